"""Write README.md from nbs/index.ipynb; cells tagged `remove-input` show their output only."""

from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

NBS = Path(__file__).resolve().parent
config = Config()
config.TagRemovePreprocessor.enabled = True
config.TagRemovePreprocessor.remove_input_tags = {"remove-input"}
config.MarkdownExporter.preprocessors = ["nbconvert.preprocessors.TagRemovePreprocessor"]

notebook = nbformat.read(NBS / "index.ipynb", as_version=4)
text, _ = MarkdownExporter(config=config).from_notebook_node(notebook)
lines = [line.rstrip() for line in text.strip().splitlines()]
header = "<!-- Made from nbs/index.ipynb by `make sync`. -->\n\n"
(NBS.parent / "README.md").write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
