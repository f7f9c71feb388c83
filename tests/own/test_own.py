"""Own code by its import path: how it is named, found, imported afresh and copied, and how its errors are told."""

import sys
import textwrap
from pathlib import Path

import pytest

from mmfsdp.own import modules
from mmfsdp.own.calls import OwnCodeError, call_own, load_own
from mmfsdp.own.modules import code_from, own_sources
from mmfsdp.params import ParamError, RunParams
from mmfsdp.params.own import own_fields
from tests.processes import in_fresh_python
from tests.tracebacks import shows_package


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder; it is not on sys.path, as for a command that is a script in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def test_a_reader_makes_the_source_own_and_a_single_callback_is_a_list():
    params = RunParams().change(**{"data.reader": "my_data:read", "train.callbacks": "my_log:Log"})
    assert str(params.data.source) == "own"
    assert params.train.callbacks == ("my_log:Log",)
    assert RunParams.from_dict(params.to_dict()) == params
    more = {"reader": {"call": "a:b", "size": 3}}
    params = params.change(**{"data.more": [more]}).change(**{"data.more.0.reader.size": 4})
    named = [("data.reader", "my_data:read"), ("data.more.0.reader", {"call": "a:b", "size": 4})]
    assert own_fields(params) == [*named, ("train.callbacks", "my_log:Log")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.reader": "read"}, "data.reader: 'read' is no import path; write my_module:name"),
        ({"data.reader": 3}, "data.reader: 3 is no import path"),
        ({"data.reader": {"call": "a:b", "x y": 1}}, "'x y', which is no name of an argument"),
        ({"train.callbacks": ["a:B", "c"]}, "train.callbacks: 'c' is no import path"),
        ({"data.more": [{"reader": "../a:b"}]}, "data.more.0.reader: '../a:b' is no import path"),
        (
            {"data.reader": "a:b", "data.source": "json", "data.path": "x"},
            "'a:b' is the source own, but source is json",
        ),
        ({"data.source": "own"}, "data.reader: source own needs a reader"),
        (
            {"data.reader": "a:b", "data.pictures": "x"},
            "data.pictures: 'x' has no effect unless source is folder or json",
        ),
    ],
)
def test_a_wrong_path_is_refused_by_the_name_of_its_field(changes, message):
    with pytest.raises(ParamError) as error:
        RunParams().change(**changes)
    assert message in str(error.value)


def test_a_module_of_the_current_folder_is_called_with_its_arguments():
    write("my_data.py", "def read(first, size=2):\n    return [first] * size")
    assert call_own("data.reader", {"call": "my_data:read", "size": 3}, 7) == [7, 7, 7]
    assert call_own("data.reader", "os.path:join", "a", "b") == "a/b"


def test_an_edited_module_is_imported_afresh_though_its_length_and_second_stay():
    write("helper.py", "SIZE = 1")
    write("my_data.py", "import helper\ndef read():\n    return helper.SIZE")
    assert call_own("data.reader", "my_data:read") == 1
    kept = load_own("data.reader", "my_data:read")
    assert load_own("data.reader", "my_data:read") is kept, "imported twice without an edit"
    for size in (2, 3, 4):
        write("helper.py", f"SIZE = {size}")
        assert call_own("data.reader", "my_data:read") == size
    assert not Path("__pycache__").exists()


def test_a_module_that_a_cell_imported_before_it_was_edited_is_imported_afresh(monkeypatch):
    monkeypatch.syspath_prepend("")
    write("my_cell.py", "def read():\n    return 1")
    import my_cell

    write("my_cell.py", "def read():\n    return 2")
    assert my_cell.read() == 1
    assert call_own("data.reader", "my_cell:read") == 2


def test_packages_with_and_without_init_are_found_and_edited():
    write("pkg/mod.py", "from . import other\ndef read():\n    return other.VALUE")
    write("pkg/other.py", "VALUE = 1")
    assert call_own("data.reader", "pkg.mod:read") == 1
    write("pkg/__init__.py", "")
    write("pkg/other.py", "VALUE = 2")
    assert call_own("data.reader", "pkg.mod:read") == 2
    assert set(own_sources(["pkg.mod"]).files) == {"pkg/__init__.py", "pkg/mod.py", "pkg/other.py"}


def test_the_sources_are_those_that_were_executed_with_all_that_they_import():
    text = "import helper, numpy\nfrom importlib import import_module\nimport_module('by_name')\n"
    write("my_data.py", text + "def read():\n    import_module('when_called')")
    write("when_called.py", "VALUE = 1")
    write("helper.py", "def late():\n    from pkg import later\n    return later")
    write("pkg/later.py", "VALUE = 1")
    write("by_name.py", "VALUE = 1")
    write("unused.py", "VALUE = 1")
    write("my_data.json", "{}")
    write("other_data.py", "import json\ndef read(): ...")
    call_own("data.reader", "my_data:read")
    call_own("data.reader", "other_data:read")
    write("helper.py", "EDITED = 'after the import'")
    sources = own_sources(["my_data"])
    assert set(sources.files) == {"my_data.py", "helper.py", "by_name.py", "when_called.py"}
    assert set(own_sources(["other_data"]).files) == {"other_data.py"}
    assert sources.files["helper.py"].startswith(b"def late()")
    assert sources.packages.keys() == {"numpy"}


def test_functions_name_what_only_a_rank_will_import():
    write("my_data.py", "def read():\n    from pkg import later\n    return later")
    write("pkg/later.py", "VALUE = 1")
    load_own("data.reader", "my_data:read")
    assert set(own_sources(["my_data"]).files) == {"my_data.py", "pkg/later.py"}


def test_more_code_than_a_run_folder_takes_is_refused(monkeypatch):
    monkeypatch.setattr("mmfsdp.own.modules.MAX_BYTES", 1 << 20)
    write("large.py", "TEXT = '" + "a" * (1 << 20) + "'\ndef read(): ...")
    load_own("data.reader", "large:read")
    with pytest.raises(ValueError, match="1 files of 1.0 MiB; a run folder takes 1 MiB"):
        own_sources(["large"])


def test_code_from_another_folder_stands_for_the_current_one(tmp_path):
    write("my_data.py", "def read():\n    return 'here'")
    write("copy/my_data.py", "def read():\n    return 'copy'")
    assert call_own("data.reader", "my_data:read") == "here"
    with code_from(tmp_path / "copy"):
        assert call_own("data.reader", "my_data:read") == "copy"
    assert call_own("data.reader", "my_data:read") == "here"


CAUSE = "KeyError: 'a'\n\nThe above exception was the direct cause of the following exception:\n\nTraceback"


@pytest.mark.parametrize(
    ("text", "path", "message", "lines"),
    [
        (
            "",
            "my_dta:read",
            "there is no module 'my_dta' in the current folder or installed; did you mean my_data?",
            "",
        ),
        ("def read(): ...", "my_data:raed", "raed is not there in ", ""),
        ("read = 3", "my_data:read", "read is nothing to call in ", ""),
        ("def read(size): ...", "my_data:read", "read(size) is called wrongly: missing a required argument", ""),
        ("import nowhere", "my_data:read", "ModuleNotFoundError: No module named 'nowhere'", "import nowhere"),
        ("def read(:", "my_data:read", "SyntaxError: invalid syntax", "def read(:"),
        ("import sys\nsys.exit(3)", "my_data:read", "cannot be imported: SystemExit: 3", "sys.exit(3)"),
        ("def read():\n    raise ValueError('b') from KeyError('a')", "my_data:read", "raised ValueError: b", CAUSE),
        ("def read():\n    return {}['key']", "my_data:read", "raised KeyError: 'key'", "return {}['key']"),
        (
            "def read():\n    raise ValueError('\\x1b[31mred')",
            "my_data:read",
            "raised ValueError: red",
            "ValueError: red",
        ),
    ],
)
def test_an_error_names_the_field_and_shows_the_lines_of_the_person_alone(text, path, message, lines):
    write("my_data.py", text)
    with pytest.raises(OwnCodeError) as error:
        call_own("data.reader", path)
    assert str(error.value).startswith("data.reader: ")
    assert message in str(error.value)
    assert lines in error.value.traceback
    assert not shows_package(error.value.traceback)
    assert "importlib" not in error.value.traceback
    assert "\x1b" not in error.value.traceback
    under = OwnCodeError("reader", "words", "lines").under("data")
    assert (type(under), under.field, under.traceback) == (OwnCodeError, "data.reader", "lines")


def test_a_file_with_the_name_of_another_module_is_named():
    import json

    for name in ("json", "yaml"):
        write(f"{name}.py", "def read(): ...")
        with pytest.raises(OwnCodeError, match=f"{name}.py has the name of another module, {name}, so one hides"):
            load_own("data.reader", f"{name}:read")
    assert sys.modules["json"] is json


def test_a_notebook_shows_the_lines_of_the_person_and_none_of_this_package():
    write("my_data.py", "def read():\n    return {}['key']")
    cell = "from mmfsdp.own.calls import call_own; call_own('data.reader', 'my_data:read')"
    code = "from IPython.core.interactiveshell import InteractiveShell\n"
    code += f"InteractiveShell.instance(colors='NoColor').run_cell({cell!r})"
    shown = in_fresh_python(code)
    assert "return {}['key']" in shown
    assert "OwnCodeError: data.reader: 'my_data:read' raised KeyError: 'key'" in shown
    assert "calls.py" not in shown


def test_an_editable_installation_is_known_by_its_version_unless_it_holds_the_entry(tmp_path, monkeypatch):
    """transformers in a folder of its sources would be more than a run folder takes."""
    write("elsewhere/large/__init__.py", "from . import part")
    write("elsewhere/large/part.py", "def read():\n    return 1")
    info = tmp_path / "elsewhere/large-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: large\nVersion: 1.5\n")
    (info / "top_level.txt").write_text("large\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    modules.distributions.cache_clear()
    try:
        write("my_data.py", "import large.part\ndef read():\n    return large.part.read()")
        assert call_own("data.reader", "my_data:read") == 1
        sources = own_sources(["my_data"])
        assert (set(sources.files), sources.packages) == ({"my_data.py"}, {"large": "1.5"})
        assert call_own("data.reader", "large.part:read") == 1
        assert set(own_sources(["large.part"]).files) == {"large/__init__.py", "large/part.py"}
    finally:
        modules.distributions.cache_clear()
