"""
Has mkdocs take the pages that are outside of docs/ and those of the API reference, and leads the
links of all pages, which are written for who reads them in the repository, through the site.
"""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# mkdocs imports this by its path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.site import sources


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in sources.pages().items():
        if not path.startswith("docs/"):
            file = File.generated(config, page, abs_src_path=str(sources.ROOT / path))
            files.append(file)
    for page, markdown in sources.api_pages().items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for path, in_site in sources.pages().items():
        if in_site == page.file.src_uri:
            return sources.with_links_of_the_site(markdown, path)
    return markdown
