import json

from dslib.suite._nbformat import nbformat
from dslib.suite.outputs import bounded, errors, has_figure, last_frames, tidy

v4 = nbformat.v4


def stream(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


def image():
    return v4.new_output("display_data", data={"image/png": "x"})


def test_two_hundred_pieces_of_a_stream_become_one():
    joined = tidy([stream(f"{i}\n") for i in range(200)])
    assert len(joined) == 1
    assert joined[0].text.startswith("0\n1\n")


def test_the_order_of_two_streams_does_not_depend_on_luck():
    one = tidy([stream("a"), stream("e", "stderr"), stream("b")])
    other = tidy([stream("e", "stderr"), stream("a"), stream("b")])
    assert one == other
    assert [output.text for output in one] == ["ab", "e"]


def test_text_before_and_after_a_figure_stays_on_its_side():
    kinds = [output.get("text", "figure") for output in tidy([stream("before"), image(), stream("after")])]
    assert kinds == ["before", "figure", "after"]


def test_a_progress_bar_shows_its_last_state():
    assert (
        tidy([stream("0 %\r"), stream("50 %\r"), stream("100 %\n"), stream("done")])[0].text == "100 %\ndone"
    )
    assert tidy([stream("a\r\nb\r\n")])[0].text == "a\nb\n"


def test_long_text_keeps_both_ends_and_counts_the_rest():
    text = bounded("a" * 15_000 + "b" * 100_000 + "c" * 5_000)
    assert text.startswith("a" * 15_000 + "\n…")
    assert text.endswith("c" * 5_000)
    assert "100000 characters left out" in text


def test_a_report_is_never_cut():
    from dslib.suite.reporting import MIME

    payload = {"id": "a.b", "samples": [0.123456789] * 20_000, "null": None, "profile": "quick"}
    output = v4.new_output("display_data", data={MIME: payload, "text/plain": "x" * 50_000})
    assert tidy([output])[0].data[MIME] == payload
    assert len(output.data["text/plain"]) < 21_000


def test_one_very_long_line_is_handled_quickly():
    assert len(tidy([stream("x" * 2_000_000)])[0].text) < 21_000


def test_errors_in_cells_and_widgets_are_found_and_exercises_are_not():
    error = v4.new_output("error", ename="E", evalue="v", traceback=[])
    plain, exercise = v4.new_code_cell("a", outputs=[error]), v4.new_code_cell("b", outputs=[error])
    exercise.metadata["tags"] = ["raises-exception"]
    notebook = v4.new_notebook(cells=[exercise, plain])
    state = {"m": {"state": {"outputs": [json.loads(json.dumps(error))]}}, "n": {"state": {}}}
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state}}
    assert [cell for cell, _ in errors(notebook)] == [1, None]


def test_an_error_in_a_thread_stops_no_cell_and_is_found():
    text = "Exception in thread Thread-3:\nTraceback (most recent call last):\n"
    text += "ZeroDivisionError: division by zero\n"
    cell = v4.new_code_cell(
        "a", outputs=[stream("Traceback", "stderr"), stream(text), stream(text, "stderr")]
    )
    ((position, found),) = errors(v4.new_notebook(cells=[cell]))
    assert (position, found["ename"], found["evalue"]) == (0, "ZeroDivisionError", "division by zero")


def test_a_figure_in_a_widget_counts():
    notebook = v4.new_notebook()
    assert not has_figure(notebook)
    state = {"m": {"state": {"outputs": [{"output_type": "display_data", "data": {"image/svg+xml": "x"}}]}}}
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state}}
    assert has_figure(notebook)


def test_frames_are_plain_and_the_last_ones():
    frames = last_frames(["\x1b[31mred\x1b[0m"] + [f"line {i}" for i in range(100)])
    assert "\x1b" not in frames
    assert frames.endswith("line 99")
    assert len(frames.splitlines()) < 30
