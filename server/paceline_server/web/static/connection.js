// How the page talks to the coordinator: with a token, for a limited time, and again when a connection is lost.

import { setClass, setText } from "./rows.js";
import { lasted } from "./words.js";

const SILENCE_S = 5; // without a byte for so long, the stream counts as lost
const FIRST_BYTE_S = 4; // a stream that does not begin is asked for again; a browser may hold a request for ever
const MOST_FIRST_BYTE_S = 12;
const ANSWER_S = 8; // the same for other requests
const RETRY_MS = [300, 1000, 2000, 4000];
const DONE_RETRY_MS = 30000; // nothing is missing, and another run may serve here later

const TOKEN = "paceline-token";

const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  sessionStorage.setItem(TOKEN, fragment.get("token"));
  history.replaceState(null, "", location.pathname + location.search); // neither history nor a copied address has it
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  forget: () => sessionStorage.removeItem(TOKEN),
};

/** An answer that says why there is no better one. */
export class Refused extends Error {
  constructor(status, text, waitS = 0) {
    super(text);
    this.status = status;
    this.waitS = waitS; // seconds after which the coordinator may be asked again
  }
}

let returns = 0; // how often the network has come back
addEventListener("online", () => (returns += 1));

/** Waits, but not once the network has come back; it may have done so since it had come back `seen` times. */
export const pause = (ms, seen = returns) =>
  new Promise((resolve) => {
    if (returns > seen) return resolve();
    const over = new AbortController();
    const end = () => (over.abort(), resolve());
    setTimeout(end, ms);
    addEventListener("online", end, { signal: over.signal });
  });

/** Asks the coordinator; the answer and its body must come in `seconds`, unless the caller has a signal of its own. */
export async function call(path, { seconds = ANSWER_S, ...options } = {}) {
  // No foreign page may send X-Paceline: the coordinator asks members only for pages that can (web/asking.py).
  const headers = { ...options.headers, "X-Paceline": "page", ...(token.get() ? { Authorization: `Bearer ${token.get()}` } : {}) };
  const signal = options.signal ?? AbortSignal.timeout(1000 * seconds);
  const answer = await fetch(path, { ...options, headers, signal, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  const wait = Number(answer.headers.get("Retry-After")) || 0;
  throw new Refused(answer.status, error ?? `the coordinator answered ${answer.status}`, wait);
}

export const get = async (path, options) => (await call(path, options)).json();

/** Why a call failed, for people. */
export const reason = (error) =>
  error instanceof Refused ? error.message : error.name === "TimeoutError" ? "no answer came in time" : "the coordinator cannot be reached";

/** Reads one stream of server-sent events to its end. */
async function read(path, signal, alive, take) {
  const reader = (await call(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [event, data] = block.split("\n"); // a comment has no data: it says that the connection is alive
      if (!data) continue;
      const message = JSON.parse(data.slice("data:".length));
      if (event === "event: end") throw new Refused(404, message.error); // the job has gone
      take(message);
    }
  }
}

/**
 * Follows a stream for ever, over lost connections; throws if a token is missing.
 *
 * `began` is called for each new connection. `done` says, in words, that all is done, so that nothing is missing when
 * the connection ends; "" if it is not. Its argument is true if the coordinator is there, and knows the job no more.
 */
export async function follow(path, { take, began = () => {}, done }) {
  let lostAt = null;
  let failures = 0;
  for (;;) {
    const seen = returns; // a request that began without a network is made again at once
    const stop = new AbortController();
    let watch = null;
    let begun = false;
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => stop.abort(), 1000 * SILENCE_S);
      lostAt = null;
      failures = 0;
      connection("good", "live");
      if (!begun) began();
      begun = true;
    };
    watch = setTimeout(() => stop.abort(), 1000 * Math.min(FIRST_BYTE_S * (failures + 1), MOST_FIRST_BYTE_S));
    let why = "connection lost";
    let waitS = 0;
    let forgotten = false;
    try {
      await read(path, stop.signal, alive, take);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) throw error;
      if (error instanceof Refused) ({ message: why, waitS } = error);
      forgotten = error instanceof Refused && error.status === 404;
    }
    clearTimeout(watch);
    lostAt ??= Date.now();
    if (done(forgotten)) connection("calm", done(forgotten));
    else connection("bad", `${why}; trying again for ${lasted((Date.now() - lostAt) / 1000)}`);
    const soon = done(forgotten) ? DONE_RETRY_MS : RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
    await pause(Math.max(1000 * waitS, soon), seen);
  }
}

/** Says how the connection is. */
export function connection(mood, text) {
  const chip = document.getElementById("connection");
  setClass(chip, mood);
  setText(chip, text);
  document.body.classList.toggle("stale", mood === "bad");
}
