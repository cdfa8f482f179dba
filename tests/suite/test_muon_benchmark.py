"""The benchmark's table on tiny cases: every row is there, and a miss is printed."""

from dslib.suite.benchmarks import muon


def test_table_has_three_rows_a_case_with_errors_and_goals(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(muon, "CASES", (("2 × 8²", 2, (8, 8), 0.0), ("4 × 16", 1, (4, 16), 1e9)))
    monkeypatch.setattr(muon, "REPEATS", 2)
    muon.main()
    printed = capsys.readouterr().out
    assert all(printed.count(name) >= 2 for name in ("ours", "torch", "textbook"))
    assert "missed" in printed
    assert "reached" in printed


def test_textbook_peer_and_torch_do_what_ours_does():
    updates = []
    for make in (
        lambda ps: muon.Muon(ps, lr=1e-3, weight_decay=0),
        lambda ps: muon.TextbookMuon(ps, lr=1e-3),
    ):
        parameters = muon._parameters(2, (6, 10))
        before = [p.detach().clone() for p in parameters]
        make(parameters).step()
        updates.append(muon._error(before, parameters))
    assert abs(updates[0] - updates[1]) < 0.02
