// Loads the page again if one of its files did not come: a browser may hold a request for ever when the network changes.

{
  const TRIES = "paceline-loads";
  const tries = Number(sessionStorage.getItem(TRIES) ?? 0);
  let timer = null;
  // page.js leaves a mark, which is found whichever of the two comes first.
  const isThere = () => "runs" in document.documentElement.dataset && document.querySelector('link[href="static/page.css"]').sheet !== null;
  const look = () => {
    if (isThere()) return;
    sessionStorage.setItem(TRIES, `${tries + 1}`); // a slow network gets twice as long each time
    location.reload();
  };
  const lookIn = (ms) => {
    clearTimeout(timer);
    timer = setTimeout(look, ms * 2 ** Math.min(tries, 4));
  };
  lookIn(5000);
  addEventListener("error", ({ target }) => /^(SCRIPT|LINK)$/.test(target.tagName) && !isThere() && lookIn(500), true);
  addEventListener("load", () => isThere() && sessionStorage.removeItem(TRIES));
}
