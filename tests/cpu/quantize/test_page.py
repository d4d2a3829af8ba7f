"""docs/quantize.md has every flag, format and algorithm of the command."""

from pathlib import Path

from quire.cli.quantize import _parser
from quire.quantize.gguf_names import ARCHITECTURES
from quire.quantize.options import ALGORITHMS
from quire.quantize.schemes import FORMATS

PAGE = (Path(__file__).resolve().parents[3] / "docs/quantize.md").read_text()


def test_the_page_has_every_flag_format_and_algorithm():
    flags = {flag for action in _parser()._actions for flag in action.option_strings}
    words = [*(flags - {"-h", "--help"}), *FORMATS, *ALGORITHMS]
    assert [one for one in words if f"`{one}`" not in PAGE] == []
    assert all(one in PAGE for one in ARCHITECTURES)
