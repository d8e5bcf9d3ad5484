"""Formulas as MathML: browsers draw them themselves, without a network and without a script.

docutils turns LaTeX into MathML. A formula that it does not know is a warning, so with `-W` an
error: mend the formula.
"""

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def mathml(node, *, as_block):
    try:
        return latex2mathml.tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        LOGGER.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{node.astext()}</code>"


def inline(translator, node):
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def displayed(translator, node):
    translator.body.append(f'<div class="formula">{mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    app.add_css_file("formulas.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
