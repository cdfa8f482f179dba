import pytest

from dslib.suite import notebooks
from dslib.suite._nbformat import nbformat
from dslib.suite.notebooks import NotebookError


@pytest.fixture
def place(tmp_path, write_notebook):
    for name in ("01_muon", "02_update_rms", "10_rlvr", "11_rl_algorithms"):
        write_notebook(tmp_path / "notebooks" / f"{name}.ipynb")
    write_notebook(tmp_path / "notebooks" / "solutions" / "01_muon.ipynb")
    write_notebook(tmp_path / "notebooks" / "scratch.ipynb")
    return tmp_path


def stems(files):
    return [file.stem for file in files]


def test_only_numbered_notebooks_count_and_solutions_do_not(place):
    files = notebooks.list_notebooks(notebooks.find_directory(start=place))
    assert stems(files) == ["01_muon", "02_update_rms", "10_rlvr", "11_rl_algorithms"]


@pytest.mark.parametrize("start", [".", "notebooks"])
def test_the_directory_is_found_from_the_root_and_from_inside(place, start):
    assert notebooks.find_directory(start=place / start) == place / "notebooks"


@pytest.mark.parametrize(
    "name",
    [
        "1",
        "01",
        "01_muon",
        "muon",
        "01_muon.ipynb",
        "notebooks/01_muon.ipynb",
        "./notebooks/01_muon.ipynb",
        "mu",
    ],
)
def test_a_number_a_stem_a_beginning_or_a_path_chooses(place, name, monkeypatch):
    monkeypatch.chdir(place)
    files = notebooks.list_notebooks(place / "notebooks")
    assert stems(notebooks.select(files, [name])) == ["01_muon"]


def test_names_are_run_once_and_in_reading_order(place):
    files = notebooks.list_notebooks(place / "notebooks")
    assert stems(notebooks.select(files, ["10", "1", "muon"])) == ["01_muon", "10_rlvr"]
    assert notebooks.select(files, []) == files


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("01_moun", "did you mean '01_muon'"),
        ("3", "called '3'"),
        ("rl", "may mean 10_rlvr or 11_rl"),
        ("", "called ''"),
    ],
)
def test_a_name_that_chooses_none_or_several_is_an_error(place, name, message):
    with pytest.raises(NotebookError, match=message):
        notebooks.select(notebooks.list_notebooks(place / "notebooks"), [name])


def test_without_notebooks_the_message_says_that_a_wheel_carries_none(tmp_path):
    with pytest.raises(NotebookError, match=r"carries none.*--notebooks"):
        notebooks.find_directory(start=tmp_path)
    with pytest.raises(NotebookError, match="elsewhere"):
        notebooks.find_directory(tmp_path / "elsewhere")


def stub(source, **metadata):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata=metadata)


@pytest.mark.parametrize(
    ("notebook", "draws"),
    [
        (stub("plt.plot(x)"), True),
        (stub("from matplotlib import pyplot"), True),
        (stub("fig, ax = style.subplots(2)"), True),
        (stub("x = 1  # plt. is not used"), False),
        (stub("plt.plot(x)", dslib={"figures": False}), False),
        (stub("curves(x)", dslib={"figures": True}), True),
    ],
)
def test_whether_a_notebook_must_show_a_figure(notebook, draws):
    assert notebooks.draws_figures(notebook) is draws


def test_the_hash_is_of_what_runs_and_not_of_outputs():
    notebook = stub("x = 1")
    before = notebooks.source_hash(notebook)
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="1")]
    notebook.cells[0].execution_count = 4
    assert notebooks.source_hash(notebook) == before
    notebook.cells[0].metadata["tags"] = ["skip-execution"]
    assert notebooks.source_hash(notebook) != before


def test_a_path_means_that_very_file_and_no_namesake(place, write_notebook):
    other = place / "elsewhere" / "01_muon.ipynb"
    write_notebook(other)
    files = notebooks.list_notebooks(place / "notebooks")
    assert notebooks.select(files, [str(other)]) == [other]
    assert notebooks.select(files, [str(other), "2"])[1] == other
    with pytest.raises(NotebookError, match="would both be called 01_muon"):
        notebooks.select(files, [str(other), "1"])


@pytest.mark.parametrize(
    "path", ["elsewhere/01_muon.ipynb", "notebooks/01_moun.ipynb", "notebooks/scratch.ipynb"]
)
def test_a_path_that_is_no_notebook_is_refused_whatever_is_called_like_it(place, path, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(NotebookError, match=path):
        notebooks.select(notebooks.list_notebooks(place / "notebooks"), [path])
