// Conversation and settings -> the body of a request; chunks of its stream -> the answer.

import { address, key } from "./api.js";
import { mediaParts } from "./attach.js";

/** {path, body} that asks for the next message after `messages`. body: FormData for a recording. */
export function requestFor(messages, settings, about) {
  if (about.transcribes) return { path: "v1/audio/transcriptions", body: recording(messages.at(-1), about) };
  const common = {
    model: about.model,
    ...settings.sampling,
    ...(settings.stop.length ? { stop: settings.stop } : {}),
    stream: true,
    stream_options: { include_usage: true },
    x_timing: true,
  };
  if (!about.chat) return { path: "v1/completions", body: completion(messages, settings, common) };
  return { path: "v1/chat/completions", body: chat(messages, settings, common) };
}

function chat(messages, settings, common) {
  const told = messages.map(wire);
  if (settings.system) told.unshift({ role: "system", content: settings.system });
  const body = { ...common, messages: told };
  if (settings.alternatives !== null) Object.assign(body, { logprobs: true, top_logprobs: settings.alternatives });
  if (settings.tools) body.tools = settings.tools;
  if (settings.thinking !== null) body.chat_template_kwargs = { enable_thinking: settings.thinking };
  return body;
}

/** A model without a chat template goes on from the last text. */
function completion(messages, settings, common) {
  const body = { max_tokens: 256, ...common, prompt: messages.at(-1).content };
  if (settings.alternatives !== null) body.logprobs = settings.alternatives;
  return body;
}

/** What is spoken in the message; its text is the prompt of the transcription. */
function recording({ content, media }, about) {
  const form = new FormData();
  form.append("model", about.model);
  if (content) form.append("prompt", content);
  form.append("file", media[0].file, media[0].name);
  return form;
}

function wire(message) {
  const { role, content, media, reasoning, toolCalls, toolCallId } = message;
  const told = { role, content };
  if (media?.length) told.content = [...mediaParts(media), ...(content ? [{ type: "text", text: content }] : [])];
  if (toolCallId) told.tool_call_id = toolCallId;
  if (reasoning) told.reasoning = reasoning;
  if (toolCalls?.length) told.tool_calls = toolCalls;
  return told;
}

/** The request as a command. The key is not in it. */
export function curlOf({ path, body }) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const words = ["curl -N", quote(address(path))];
  if (key.get()) words.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  if (body instanceof FormData) {
    for (const [name, value] of body) words.push("-F", quote(`${name}=${typeof value === "string" ? value : `@${value.name}`}`));
  } else words.push("-H 'Content-Type: application/json'", "-d", quote(JSON.stringify(body)));
  return words.join(" ");
}

/** A new answer, empty. */
export function newAnswer() {
  return {
    role: "assistant", content: "", reasoning: "", toolCalls: [], tokens: [], streaming: true,
    askedAt: performance.now(), firstAt: null, thoughtAt: null, endedAt: null,
    finish: null, error: null, usage: null, timing: null,
  };
}

/** Put one chunk of a stream into the answer. Throws what the server says went wrong. */
export function take(answer, chunk) {
  if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
  answer.usage = chunk.usage ?? answer.usage;
  answer.timing = chunk.x_timing ?? answer.timing;
  for (const choice of chunk.choices ?? []) {
    const delta = choice.delta ?? { content: choice.text };
    takeText(answer, delta);
    for (const call of delta.tool_calls ?? []) takeCall(answer.toolCalls, call);
    answer.tokens.push(...tokensOf(choice.logprobs));
    answer.finish = choice.finish_reason ?? answer.finish;
    if (choice.x_timing) answer.timing = choice.x_timing;
  }
}

function takeText(answer, delta) {
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  const content = delta.content ?? "";
  if (reasoning || content) answer.firstAt ??= performance.now();
  answer.reasoning += reasoning;
  answer.content += content;
  const thinks = answer.reasoning ? !answer.content : !answer.content.includes("</think>");
  if (!thinks) answer.thoughtAt ??= performance.now();
}

function takeCall(calls, piece) {
  const call = (calls[piece.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id = piece.id ?? call.id;
  call.function.name += piece.function?.name ?? "";
  call.function.arguments += piece.function?.arguments ?? "";
}

/** Logprobs in either of the two shapes -> [{token, logprob, top_logprobs}]. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content;
  return (logprobs.tokens ?? []).map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i] ?? 0,
    top_logprobs: Object.entries(logprobs.top_logprobs?.[i] ?? {})
      .map(([name, logprob]) => ({ token: name, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}
