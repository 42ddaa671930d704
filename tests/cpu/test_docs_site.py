"""The documentation site builds offline with strict link checks and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
needs_generator = pytest.mark.skipif(
    importlib.util.find_spec("properdocs") is None, reason="needs ProperDocs: pip install 'leanmla[docs]'"
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "properdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@needs_generator
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path):
    done = build(ROOT / "properdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    made = {p.stem for p in (tmp_path / "site").glob("*.html")}
    assert {p.stem for p in PAGES} <= made
    for page in (tmp_path / "site").glob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]+)\"|<link[^>]*\shref=\"([^\"]+)\"", text)
        outside = [a or b for a, b in fetched if re.match(r"(https?:)?//", a or b)]
        assert not outside, (page.name, outside)
        assert 'href="../' not in text, page.name  # the hook has dealt with links to files of the repository


@needs_generator
@pytest.mark.parametrize(
    "words, complaint", [("[x](none.md)", "none.md"), ("[x](../leanmla/none.py)", "none.py"), ("[x](a.md#b)", "#b")]
)
def test_a_link_to_nothing_fails_the_build(tmp_path, words, complaint):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Index\n\n[a](a.md)\n")
    (tmp_path / "docs" / "a.md").write_text(f"# A\n\n{words}\n")
    shutil.copy(ROOT / "tools" / "docs_hooks.py", tmp_path / "tools")
    config = (ROOT / "properdocs.yml").read_text()
    config = re.sub(r"nav:\n(  .*\n)+", "nav:\n  - index.md\n  - a.md\n", config)
    (tmp_path / "properdocs.yml").write_text(config)
    done = build(tmp_path / "properdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and complaint in done.stderr, done.stderr
    (tmp_path / "docs" / "a.md").write_text("# A\n")
    assert build(tmp_path / "properdocs.yml", tmp_path / "site").returncode == 0


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "properdocs.yml").read_text(), re.MULTILINE))
    assert {p.name for p in PAGES} <= listed


def test_links_to_files_become_their_paths(tmp_path):
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "tools" / "docs_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    class page:
        class file:
            src_uri = "index.md"

    config = {"config_file_path": str(ROOT / "properdocs.yml"), "docs_dir": str(ROOT / "docs")}

    def changed(text: str) -> str:
        return hooks.on_page_markdown(text, page, config, None)

    assert changed("see [`leanmla/decode.py`](../leanmla/decode.py).") == "see `leanmla/decode.py`."
    assert changed("see [the plan](../leanmla/decode.py#L3).") == "see the plan (`leanmla/decode.py`)."
    for same in ("[x](formats.md)", "[x](../leanmla/none.py)", "![x](figures/a.svg)", "[x](../../outside.md)"):
        assert changed(same) == same


def test_porting_has_both_sides_of_three_libraries_and_checks_them():
    text = (ROOT / "docs" / "porting.md").read_text()
    for name, call in (
        ("aiter", "mla_decode_fwd("),
        ("flash_mla", "flash_mla_with_kvcache("),
        ("flashinfer", "BatchMLAPagedAttentionWrapper("),
    ):
        assert f'compat.install("{name}"' in text and call in text
    assert text.count("assert close(out, o") == 3


def test_pictures_in_the_pages_say_what_they_show():
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(words) > 15 and (page.parent / target).exists(), (page.name, target)


def test_every_setting_and_backend_is_explained():
    from leanmla import backends, settings

    conventions, choosing = (
        (ROOT / "docs" / f"{p}.md").read_text(encoding="utf-8") for p in ("conventions", "choosing_a_backend")
    )
    assert [name for name in settings.VARIABLES if f"`{name}`" not in conventions] == []
    assert [name for name in backends.NAMES if f"| `{name}` |" not in choosing] == []


def _slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def test_anchors_lead_to_headings_also_outside_the_site():
    pages = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "leanmla").rglob("*.md")]
    anchors = {p: {_slug(h) for h in re.findall(r"^#+ (.+)$", p.read_text(), re.MULTILINE)} for p in pages}
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", page.read_text()):
            found = anchors.get((page.parent / target).resolve() if target else page, set())
            assert anchor in found, f"{page.name}: {target}#{anchor}"


#: Columns of README's table of times that come from a committed result, and which; figures of the others have no result file.
RESULT_OF = dict.fromkeys(
    ("hopper bf16", "hopper fp8", "hopper_cuda mxfp4_row320", "hopper_cuda mxfp4", "triton bf16", "triton fp8"), "h200_contest"
)


def test_times_in_the_readme_are_those_of_the_committed_results():
    section = (ROOT / "README.md").read_text().split("\n## Measured\n")[1].split("\n## ")[0]
    rows = [
        [c.replace("`", "").strip() for c in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    head, body = rows[0], [r for r in rows[2:] if len(r) == len(rows[0])]
    assert set(RESULT_OF) <= set(head) and len(body) == 8
    for name in set(RESULT_OF.values()):
        assert f"benchmarks/results/{name}.json)" in section
    for column, name in RESULT_OF.items():
        results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]
        times = {r["case"]: r["time_us"] for r in results if r["contender"] == column}
        for row in body:
            assert row[head.index(column)] == f"{times[row[0].replace('×', 'x')]:.1f}", (row[0], column)
    for column in set(head[1:]) - set(RESULT_OF):  # said to have none
        assert column.split()[0] in section.split("development runs")[0]
