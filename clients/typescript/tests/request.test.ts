import assert from "node:assert/strict";
import { test } from "node:test";

import { ToolChoice } from "../src/gen/quartet/v1/router_pb.js";
import { makeStart, type Chat, type GenerateOptions, type Prompt } from "../src/request.js";

function chatOf(chat: Chat) {
  const { prompt } = makeStart(chat);
  assert.ok(prompt.case === "chat");
  return prompt.value;
}

test("a prompt is text, a conversation or token ids", () => {
  assert.deepEqual(makeStart("hello").prompt, { case: "text", value: "hello" });
  const { prompt } = makeStart({ tokenIds: [1, 2] });
  assert.ok(prompt.case === "tokenIds");
  assert.deepEqual(prompt.value.ids, [1, 2]);
  assert.throws(() => makeStart({} as Prompt), { field: "prompt" });
});

test("pictures are parts of a message, in order", () => {
  const file = new Uint8Array([1, 2, 3]);
  const content = [file, { url: "https://a/b.png" }, { embeddings: file }, "What is it?"];
  const [message] = chatOf({ messages: [{ role: "user", content }] }).messages;
  const sources = message?.parts.map(({ part }) => (part.case === "media" ? part.value.source : part));
  assert.deepEqual(sources, [
    { case: "data", value: file },
    { case: "url", value: "https://a/b.png" },
    { case: "embeddings", value: file },
    { case: "text", value: "What is it?" },
  ]);
});

test("tools are JSON on the way, and one of them may have to be called", () => {
  const tools = [{ name: "add", description: "Adds.", parameters: { type: "object" }, strict: true }];
  const chat = chatOf({ messages: [], tools, toolChoice: { name: "add" }, templateArguments: { effort: "low" } });
  assert.deepEqual(
    chat.tools.map(({ name, description, parameters, strict }) => [name, description, parameters, strict]),
    [["add", "Adds.", '{"type":"object"}', true]],
  );
  assert.deepEqual([chat.toolChoice, chat.toolName], [ToolChoice.FUNCTION, "add"]);
  assert.equal(chat.templateArguments, '{"effort":"low"}');
  assert.equal(chatOf({ messages: [], toolChoice: "none" }).toolChoice, ToolChoice.NONE);
});

test("times are in milliseconds", () => {
  const { timeout, ttftTarget, itlTarget } = makeStart("x", { timeoutMs: 1500, ttftTargetMs: 0.5 });
  assert.deepEqual([timeout?.seconds, timeout?.nanos, ttftTarget?.nanos], [1n, 500_000_000, 500_000]);
  assert.equal(itlTarget, undefined);
});

const IMPOSSIBLE: [GenerateOptions, string][] = [
  [{ seed: -1n }, "seed"],
  [{ sampling: { topK: -1 } }, "sampling.top_k"],
  [{ sampling: { maxTokens: 1.5 } }, "sampling.max_tokens"],
  [{ output: { logprobs: NaN } }, "output.logprobs"],
  [{ numChoices: 0 }, "num_choices"],
  [{ timeoutMs: -1 }, "timeout"],
  [{ ttftTargetMs: Infinity }, "ttft_target"],
  [{ traceparent: "a\nb" }, "traceparent"],
  [{ media: [new Uint8Array(64 << 20)] }, "media"],
];

for (const [options, field] of IMPOSSIBLE) {
  test(`what no router could take is refused here, by its name: ${field}`, () => {
    assert.throws(() => makeStart("x", options), { name: "QuartetError", field });
  });
}

const user = (content: unknown) => ({ messages: [{ role: "user", content }] });
/** What only callers without a compiler send. */
const OF_WRONG_TYPE: [prompt: unknown, field: string, options?: unknown][] = [
  [null, "prompt"],
  [undefined, "prompt"],
  [7, "prompt"],
  [[], "prompt"],
  [{ tokenIds: null }, "token_ids.ids"],
  [{ tokenIds: ["a"] }, "token_ids.ids"],
  [{ messages: null }, "chat.messages"],
  [{ messages: "hello" }, "chat.messages"],
  [{ messages: [null] }, "chat.messages[0]"],
  [user(null), "chat.messages[0].parts"],
  [user(["text", null]), "chat.messages[0].parts[1]"],
  [user([{ picture: "a" }]), "chat.messages[0].parts[0]"],
  [{ messages: [{ role: "assistant", toolCalls: [null] }] }, "chat.messages[0].tool_calls[0]"],
  [{ messages: [], tools: [undefined] }, "chat.tools[0]"],
  [{ messages: [], toolChoice: null }, "chat.tool_choice"],
  ["x", "media", { media: null }],
  ["x", "media[1]", { media: [{ url: "u" }, 5] }],
];

for (const [prompt, field, options] of OF_WRONG_TYPE) {
  test(`a value of a wrong type is refused by its name: ${JSON.stringify([prompt, options])}`, () => {
    const refused = { name: "QuartetError", reason: "INVALID_FIELD", field };
    assert.throws(() => makeStart(prompt as Prompt, options as GenerateOptions), refused);
  });
}

test("token ids may be in a typed array", () => {
  const { prompt } = makeStart({ tokenIds: new Uint32Array([1, 2]) as unknown as number[] });
  assert.ok(prompt.case === "tokenIds");
  assert.deepEqual(prompt.value.ids, [1, 2]);
});
