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


def test_slow_cases_still_get_a_minimum_and_a_maximum():
    assert [muon._rounds(seconds) for seconds in (0.0, 1e-3, 30.0, 1e4)] == [muon.REPEATS, muon.REPEATS, 4, 2]


def test_interrupted_benchmark_prints_what_it_has(monkeypatch, capsys):
    def measure(title, *rest):
        if title == "second":
            raise KeyboardInterrupt
        return [["first  ours", "1", "1–1", 2, "1", "", "0", "0"]]

    monkeypatch.setattr(muon, "CASES", (("first",), ("second",)))
    monkeypatch.setattr(muon, "_measure", measure)
    try:
        muon.main()
    except KeyboardInterrupt:
        pass
    assert "first  ours" in capsys.readouterr().out
