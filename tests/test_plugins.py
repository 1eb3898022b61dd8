"""Objects by import path."""

import subprocess
import sys

import pytest

from stepladder.errors import ConfigError
from stepladder.plugins import load_object


def test_names_inside_modules_and_files(tmp_path):
    assert load_object("stepladder.types:Task.__doc__").startswith("One problem")
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n    class B: y = 2\n"
    )
    assert load_object(f"{file}:A")().x == 1
    assert load_object(f"{file}:A.B").y == 2
    assert load_object(f"{file}:A") is load_object(f"{file}:A")  # run once


def test_a_script_that_runs_is_not_run_again_for_its_own_class(tmp_path):
    """`stepladder.train(recipe, environment=Shop)` in a script without a guard would train twice."""
    script = tmp_path / "shop.py"
    script.write_text(
        "from stepladder.plugins import import_path, load_object\n"
        "class Shop: pass\n"
        "print('run')\n"
        "assert load_object(import_path(Shop)) is Shop\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "run\n"), done.stderr


@pytest.mark.parametrize("path", ["", "name", "module:", ":Name", "file.py"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match=r"write 'package\.module:Name'"):
        load_object(path, what="reward")


def test_errors_inside_a_file_are_its_own_and_leave_nothing_behind(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_package_for_sure\n")
    before = set(sys.modules)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_for_sure"):
        load_object(f"{file}:A")
    assert not [name for name in set(sys.modules) - before if "broken" in name]
    file.write_text("A = 1\n")
    assert load_object(f"{file}:A") == 1


def test_a_missing_package_inside_a_module_is_not_called_a_wrong_path(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_package_for_sure\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        load_object("needs_more:A")
    with pytest.raises(ConfigError, match="no 'needs_moer' on the import path"):
        load_object("needs_moer:A")


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_mine.py").write_text("X = 3\n")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import X\n")
    assert load_object(f"{tmp_path}/mine.py:X") == 3


def test_nearest_names_and_directories(tmp_path):
    (tmp_path / "one.py").write_text("Alpha = 1\n")
    for path, hint in [("one.py:Alhpa", "Did you mean 'Alpha'"), ("noe.py:Alpha", "Did you mean 'one.py'")]:
        with pytest.raises(ConfigError, match=hint):
            load_object(f"{tmp_path}/{path}")
    with pytest.raises(ConfigError, match="It has: Alpha"):
        load_object(f"{tmp_path}/one.py:Zzzzz")
    with pytest.raises(ConfigError, match="does not exist"):
        load_object("/no/such/folder/x.py:A")
