"""Scripts by which tests look at the page."""

from __future__ import annotations

from support.browser import Page

__all__ = ["CONTRAST", "CUT_OFF", "FIGURES", "HEADS", "HOSTILE", "RANKS", "ROWS", "TILES", "shown"]

HOSTILE = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"

CUT_OFF = """
(() => {
  const edge = (element) => element.getBoundingClientRect().right;
  const parts = [...document.querySelectorAll("table td, table button")].filter((part) => part.checkVisibility());
  return parts.filter((part) => edge(part) > edge(part.closest("table"))).map((part) => part.outerHTML);
})()
"""
"""Parts of tables that lie beyond their right edge."""

ROWS = "document.querySelectorAll('#workers tbody tr')"

RANKS = f"[...{ROWS}].filter((row) => !row.hidden).map((row) => Number(row.cells[0].textContent))"
"""The ranks that the table shows, in its order."""

HEADS = """
[...document.querySelectorAll("#workers th")].filter((head) => head.checkVisibility()).map((head) => head.innerText)
"""
"""The heads of the table's columns."""

TILES = """
Object.fromEntries(
  [...document.querySelectorAll("#tiles div")].map((one) => [...one.children].map((part) => part.textContent)))
"""
"""The texts of the tiles, by name."""

FIGURES = "[...document.querySelectorAll('#plots figcaption')].map((caption) => caption.firstChild.data)"
"""The titles of the plots."""

CONTRAST = """
(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = numbers(color).map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (numbers(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    if (element.closest("noscript") || !element.checkVisibility()) continue;
    const [a, b] = [getComputedStyle(element).color, ground(element)].map(light).sort((a, b) => a - b);
    if ((b + 0.05) / (a + 0.05) < 4.5) faint.push(element.outerHTML);
  }
  return faint;
})()
"""
"""Elements whose text has less contrast than 4.5 to 1, which WCAG 2 (1.4.3) asks for."""


async def shown(page: Page, words: str, where: str = "#job-view") -> None:
    """Waits until the page shows some words."""
    await page.until(f"document.querySelector({where!r}).innerText.includes({words!r})")
