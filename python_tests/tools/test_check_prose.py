"""The prose linter: what it reads in each kind of file, and what it reports."""

from __future__ import annotations

from pathlib import Path

import check_prose
import pytest

# Written so that the linter does not report this file.
PHRASE = " ".join(["but", "for"])
BAD = f"This comes {PHRASE}".replace(" for", "\nfor") + " the rest."


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", f"# Title\n\n{BAD}\n", 3),
        ("module.py", f'"""Title."""\n\nx = """{BAD}"""\n', 3),
        ("comment.py", "x = 1\n# " + BAD.replace("\n", "\n# ") + "\ny = 2\n", 2),
        ("f_string.py", f'x = 1\ny = f"{{x}} {PHRASE} {{x}}"\n', 2),
        ("kernel.cu", "int x;\n  // " + BAD.replace("\n", "\n  // ") + "\n", 2),
        ("message.cpp", f'check("all {PHRASE} one");\n', 1),
    ],
)
def test_prose_is_read_and_code_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, line: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert check_prose.main([str(path)]) == 1
    said = capsys.readouterr().out.replace("// ", "").replace("# ", "")
    assert said == f"{path}:{line}: '{PHRASE}': write except\n"
    # The same words are not reported in code.
    if path.suffix != ".md":
        path.write_text(f"{PHRASE.replace(' ', '_')} = 1;\n")
        assert check_prose.main([str(path)]) == 0


def test_clean_prose_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text("Train the model, then evaluate it.\n")
    assert check_prose.main([str(path)]) == 0
    assert capsys.readouterr().out == ""
