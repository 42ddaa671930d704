"""For the documentation site: links to files of the repository become their paths, since the site does not contain them.

In the repository such links work. A link to a file that does not exist stays, so that a strict build refuses it.
"""

from __future__ import annotations

import re
from pathlib import Path

_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Called by MkDocs for every page."""
    root = Path(config["config_file_path"]).parent
    here = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = (here / match["target"]).resolve()
        if not target.exists() or not target.is_relative_to(root.resolve()):
            return match[0]
        path = target.relative_to(root.resolve()).as_posix()
        text = match["text"]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)
