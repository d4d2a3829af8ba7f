// The server, as this page speaks to it: one fetch with the key, errors with their message, events.

const KEY = "quire-key";
let askForKey = async () => false;
let asking = null;
let declined = false; // the person has no key: not asked again until they want to be

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What to do when the server says 401: f() is true once there is another key. */
export function onUnauthorized(f) {
  askForKey = f;
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Addresses are relative to the page, so a proxy's path in front of both is no matter. */
export const address = (path) => new URL(path, document.baseURI).href;

/** A good response, or an ApiError. */
export async function ask(path, { body, signal } = {}) {
  const isForm = body instanceof FormData; // has a type of its own
  const headers = body === undefined || isForm ? {} : { "Content-Type": "application/json" };
  const used = key.get();
  if (used) headers.Authorization = `Bearer ${used}`;
  const response = await reached(fetch(address(path), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined || isForm ? body : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  }), "The server cannot be reached.");
  if (response.ok) return response;
  if (response.status === 401 && (await anotherKey(used))) return ask(path, { body, signal });
  throw new ApiError(response.status, await messageOf(response));
}

/** What the network did not bring is told in words; an abort stays an abort. */
async function reached(promise, words) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, words);
  }
}

async function anotherKey(used) {
  if (key.get() !== used) return true; // somebody was told meanwhile
  if (declined) return false;
  asking ??= askForKey(used !== "").finally(() => {
    asking = null;
  });
  declined = !(await asking);
  return !declined;
}

/** Ask for a key again when one is needed, though the person declined before. */
export function askAgain() {
  declined = false;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return text.slice(0, 300) || `the server answered ${response.status}`;
  }
}

/** The data of each event of a stream. Comments and other fields are passed over. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reached(reader.read(), "The connection to the server broke off.");
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = dataOf(part);
        if (data !== null) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  if (!lines.length) return null;
  return lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
}
