// What an answer consists of: reasoning, text, tool calls. Servers that read these out of the text
// send them apart; where they come as marks in the text (<think>, <tool_call>) they are told apart
// here, for show only: what is sent back is the text as it came.

const THINK = ["<think>", "</think>"];
const CALL = ["<tool_call>", "</tool_call>"];

/** {reasoning, thinking, text, calls} of a message; `thinking` while the reasoning goes on. */
export function partsOf(message) {
  const own = thoughtIn(message.content ?? "");
  const reasoning = (message.reasoning ?? "") + own.reasoning;
  const found = callsIn(own.text);
  const told = (message.toolCalls ?? []).map((one) => one.function ?? {});
  const thinking = own.open || (message.streaming && !message.content && !told.length && reasoning !== "");
  return { reasoning: reasoning.trim(), thinking, text: found.text.trim(), calls: [...told, ...found.calls] };
}

function thoughtIn(content) {
  const start = content.trimStart();
  if (start.startsWith(THINK[0])) {
    const end = start.indexOf(THINK[1]);
    const inner = start.slice(THINK[0].length, end < 0 ? undefined : end);
    return { reasoning: inner, text: end < 0 ? "" : start.slice(end + THINK[1].length), open: end < 0 };
  }
  if (THINK[0].startsWith(start) && start) return { reasoning: "", text: "", open: true };
  return { reasoning: "", text: content, open: false };
}

function callsIn(content) {
  const calls = [];
  let text = "";
  let at = 0;
  for (;;) {
    const start = content.indexOf(CALL[0], at);
    if (start < 0) return { text: text + content.slice(at), calls };
    text += content.slice(at, start);
    const end = content.indexOf(CALL[1], start);
    calls.push(callOf(content.slice(start + CALL[0].length, end < 0 ? undefined : end)));
    if (end < 0) return { text, calls };
    at = end + CALL[1].length;
  }
}

function callOf(source) {
  try {
    const { name, arguments: given } = JSON.parse(source);
    return { name: String(name), arguments: typeof given === "string" ? given : JSON.stringify(given) };
  } catch {
    return { name: "", arguments: source.trim() }; // still coming, or not JSON: shown as it is
  }
}
