"""Checks of accessibility by axe-core, on the page that a browser shows."""

from importlib.resources import files
from typing import Final

from tests.browser import Browser

# Packages for Python carry axe-core; of this one only the script is used.
_SCRIPT: Final = files("axe_playwright_python").joinpath("axe.min.js")
_VIOLATIONS: Final = """axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations
  .filter(({impact}) => ["serious", "critical"].includes(impact))
  .flatMap(({id, nodes}) => nodes.map(({html, failureSummary}) => `${id}: ${html}: ${failureSummary}`)))"""


def serious_violations(browser: Browser) -> list[str]:
    """Return each element of the page that breaks a rule of serious or critical impact, and the rule."""
    browser.run(f"{_SCRIPT.read_text(encoding='utf-8')}\n;Boolean(window.axe)")
    found: list[str] = browser.run(_VIOLATIONS)
    return found
