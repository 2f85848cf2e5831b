// A request as the caller describes it, and the message that it becomes.
import { create, toBinary, type MessageInitShape } from "@bufbuild/protobuf";
import { DurationSchema, type Duration } from "@bufbuild/protobuf/wkt";
import { Code } from "@connectrpc/connect";

import { invalidRequest, QuartetError } from "./errors.js";
import {
  GenerateStartSchema,
  ToolChoice as ToolChoiceKind,
  type ChatMessageSchema,
  type ChatPromptSchema,
  type ContentPartSchema,
  type GenerateStart,
  type MediaPartSchema,
  type TextOptions as TextOptionsMessage,
  type ToolSchema,
} from "./gen/quartet/v1/router_pb.js";
import type { OutputOptions as OutputOptionsMessage, Sampling as SamplingMessage } from "./gen/quartet/v1/types_pb.js";

/** The fields of a message of the contracts, all of them optional. */
type Fields<MessageT> = { [Key in keyof Omit<MessageT, "$typeName" | "$unknown">]?: MessageT[Key] };

/** How tokens are chosen. */
export type Sampling = Fields<SamplingMessage>;

/** How text is made and where it stops. */
export type TextOptions = Fields<TextOptionsMessage>;

/** What the answer holds beside token ids and text. */
export type OutputOptions = Fields<OutputOptionsMessage>;

/**
 * A picture as an encoded file (PNG, JPEG, WebP, GIF), its URL (only the router fetches, only what its configuration
 * allows), or embeddings that were computed before, as a safetensors file.
 */
export type Media = Uint8Array | { url: string } | { embeddings: Uint8Array };

/** A call of a tool; `arguments` is a JSON object as text. */
export interface ToolCall {
  id?: string;
  name: string;
  arguments?: string;
}

/** One message of a conversation. */
export interface ChatMessage {
  /** The speaker: `system`, `user`, `assistant`, or another role that the model's template knows. */
  role: string;
  /** Text, or pieces of text and media in order. */
  content?: string | readonly (string | Media)[];
  /** The speaker's name; of a tool's result, the function's. */
  name?: string;
  /** Calls that the assistant made. */
  toolCalls?: readonly ToolCall[];
  /** The call whose result this message is. */
  toolCallId?: string;
  /** What the assistant thought before it answered. */
  reasoning?: string;
}

/** A function that the caller can run for the model. */
export interface Tool {
  name: string;
  description?: string;
  /** A JSON Schema of an object. */
  parameters?: object;
  /** Calls must follow `parameters`. */
  strict?: boolean;
}

/** A conversation, laid out by the model's chat template. */
export interface Chat {
  messages: readonly ChatMessage[];
  tools?: readonly Tool[];
  /** Whether the answer may (`auto`), must not, or must call tools, or the one that it must call. */
  toolChoice?: "auto" | "none" | "required" | { name: string };
  /** The answer may hold several calls. Default true. */
  parallelToolCalls?: boolean;
  /** Further variables of the chat template, such as `{reasoning_effort: "low"}`. */
  templateArguments?: object;
}

/** What to continue: text, a conversation, or token ids. */
export type Prompt = string | Chat | { tokenIds: readonly number[] };

/** How to continue it. */
export interface GenerateOptions {
  /** The model. Default: the only one, if there is only one. */
  model?: string;
  /** How tokens are chosen, such as `{maxTokens: 32, temperature: 0}`. */
  sampling?: Sampling;
  /** Seeds the sampling noise, unsigned 64 bit. Default: the router draws one. */
  seed?: bigint;
  /** How text is made and where it stops, such as `{stopStrings: ["\n"]}`. */
  textOptions?: TextOptions;
  /** What the answer holds beside token ids and text, such as `{logprobs: 2}`. */
  output?: OutputOptions;
  /** Answers wanted, 1 to 64. Default 1. */
  numChoices?: number;
  /** The media that placeholders in a text or in token ids stand for, in order; a chat holds its own. */
  media?: readonly Media[];
  /** Adapter (LoRA) by name. */
  adapter?: string;
  /** Requests share cached blocks only with those of equal salt. */
  cacheSalt?: string;
  /** The tenant that the request is accounted to. */
  tenant?: string;
  /** Higher first among the tenant's own queued requests. Default 0. */
  priority?: number;
  /** Requests of one conversation share it. */
  sessionKey?: string;
  /** The caller's own name for the request, for logs. */
  clientRequestId?: string;
  /** Time for the whole request. Default: the router's limit. */
  timeoutMs?: number;
  /** Time to the first token that the client wants, for routers over several pools. */
  ttftTargetMs?: number;
  /** Time between tokens that the client wants, likewise. */
  itlTargetMs?: number;
  /** W3C trace context of the caller's span, for routers and workers that trace. */
  traceparent?: string;
  /** Drops the request when it aborts: the answer then throws the signal's reason. */
  signal?: AbortSignal;
}

/** Bytes of the longest request that a router takes, less some for what wraps it. */
const MAX_START_BYTES = (64 << 20) - (64 << 10);

/**
 * The message for a request.
 *
 * @throws QuartetError: no router could take it; `field` names what is wrong. Routers check what depends on the model.
 */
export function makeStart(prompt: Prompt, options: GenerateOptions = {}): GenerateStart {
  const { sampling, seed, textOptions, output, numChoices = 1, media = [], traceparent = "" } = options;
  if (!/^[\x20-\x7e]*$/.test(traceparent)) {
    throw invalidRequest("must be printable ASCII", "traceparent");
  }
  if (!(numChoices >= 1)) {
    throw invalidRequest("must be at least 1", "num_choices");
  }
  const start = create(GenerateStartSchema, {
    model: options.model ?? "",
    prompt: makePrompt(prompt),
    ...(sampling && { sampling }),
    ...(seed !== undefined && { seed }),
    ...(textOptions && { textOptions }),
    ...(output && { output }),
    numChoices,
    media: listed(media, "media").map((one, number) => makeMedia(one, `media[${number}]`)),
    adapter: options.adapter ?? "",
    cacheSalt: options.cacheSalt ?? "",
    tenant: options.tenant ?? "",
    priority: options.priority ?? 0,
    sessionKey: options.sessionKey ?? "",
    clientRequestId: options.clientRequestId ?? "",
    ...(options.timeoutMs !== undefined && { timeout: makeDuration(options.timeoutMs, "timeout") }),
    ...(options.ttftTargetMs !== undefined && { ttftTarget: makeDuration(options.ttftTargetMs, "ttft_target") }),
    ...(options.itlTargetMs !== undefined && { itlTarget: makeDuration(options.itlTargetMs, "itl_target") }),
  });
  check(start);
  return start;
}

/** Refuse what can't be sent: on a session's stream, it would end all other requests, too. */
function check(start: GenerateStart): void {
  let size: number;
  try {
    size = toBinary(GenerateStartSchema, start).length;
  } catch (error) {
    const message = error instanceof Error ? error.message : String(error);
    throw invalidRequest(message, fieldIn(message));
  }
  if (size > MAX_START_BYTES) {
    const message = "the request is longer than 64 MiB";
    const field = start.prompt.case === "chat" ? "chat.messages" : "media";
    throw new QuartetError(Code.InvalidArgument, "MEDIA_TOO_LARGE", message, { field });
  }
}

/** The path of the field that "cannot encode field quartet.v1.Sampling.top_k to binary: ..." is about. */
function fieldIn(message: string): string {
  const [, kind = "", name = ""] = /field quartet\.v1\.(\w+)\.(\w+)/.exec(message) ?? [];
  const holder = { Sampling: "sampling.", TextOptions: "text_options.", OutputOptions: "output.", TokenIds: "token_ids." };
  return (holder[kind as keyof typeof holder] ?? "") + name;
}

function makePrompt(prompt: Prompt): GenerateStart["prompt"] {
  if (typeof prompt === "string") {
    return { case: "text", value: prompt };
  }
  if (isObject(prompt) && "tokenIds" in prompt) {
    const ids = listed(prompt.tokenIds, "token_ids.ids");
    return create(GenerateStartSchema, { prompt: { case: "tokenIds", value: { ids } } }).prompt;
  }
  if (isObject(prompt) && "messages" in prompt) {
    return create(GenerateStartSchema, { prompt: { case: "chat", value: makeChat(prompt) } }).prompt;
  }
  throw invalidRequest("a prompt is a string, {messages} or {tokenIds}", "prompt");
}

function makeChat(chat: Chat): MessageInitShape<typeof ChatPromptSchema> {
  const { toolChoice = "auto", parallelToolCalls, templateArguments } = chat;
  return {
    messages: listed(chat.messages, "chat.messages").map((message, number) => makeMessage(message, `chat.messages[${number}]`)),
    tools: listed(chat.tools ?? [], "chat.tools").map((tool, number) => makeTool(tool, `chat.tools[${number}]`)),
    toolChoice: toToolChoice(toolChoice),
    toolName: typeof toolChoice === "string" ? "" : known(toolChoice, "chat.tool_choice").name,
    ...(parallelToolCalls !== undefined && { parallelToolCalls }),
    templateArguments: templateArguments ? JSON.stringify(templateArguments) : "",
  };
}

function makeMessage(message: ChatMessage, field: string): MessageInitShape<typeof ChatMessageSchema> {
  const { role, content = "", name, toolCalls = [], toolCallId, reasoning } = known(message, field);
  const parts = `${field}.parts`;
  return {
    role,
    ...(typeof content === "string"
      ? { content }
      : { parts: listed(content, parts).map((part, number) => makePart(part, `${parts}[${number}]`)) }),
    name: name ?? "",
    toolCalls: listed(toolCalls, `${field}.tool_calls`).map((call, number) =>
      makeToolCall(call, `${field}.tool_calls[${number}]`),
    ),
    toolCallId: toolCallId ?? "",
    reasoning: reasoning ?? "",
  };
}

function makeToolCall(call: ToolCall, field: string): Required<ToolCall> {
  const { id = "", name, arguments: given = "" } = known(call, field);
  return { id, name, arguments: given };
}

function makePart(part: string | Media, field: string): MessageInitShape<typeof ContentPartSchema> {
  return typeof part === "string"
    ? { part: { case: "text", value: part } }
    : { part: { case: "media", value: makeMedia(part, field) } };
}

function makeMedia(media: Media, field: string): MessageInitShape<typeof MediaPartSchema> {
  if (media instanceof Uint8Array) {
    return { source: { case: "data", value: media } };
  }
  if (isObject(media) && "url" in media) {
    return { source: { case: "url", value: media.url } };
  }
  if (isObject(media) && "embeddings" in media) {
    return { source: { case: "embeddings", value: media.embeddings } };
  }
  throw invalidRequest("media are the bytes of a file, {url} or {embeddings}", field);
}

function makeTool(tool: Tool, field: string): MessageInitShape<typeof ToolSchema> {
  known(tool, field);
  return {
    name: tool.name,
    description: tool.description ?? "",
    parameters: tool.parameters ? JSON.stringify(tool.parameters) : "",
    ...(tool.strict !== undefined && { strict: tool.strict }),
  };
}

function toToolChoice(choice: NonNullable<Chat["toolChoice"]>): ToolChoiceKind {
  switch (choice) {
    case "auto":
      return ToolChoiceKind.AUTO;
    case "none":
      return ToolChoiceKind.NONE;
    case "required":
      return ToolChoiceKind.REQUIRED;
    default:
      return ToolChoiceKind.FUNCTION;
  }
}

function isObject(value: unknown): boolean {
  return typeof value === "object" && value !== null;
}

/** `value`, which callers in JavaScript may have of any type. */
function known<ObjectT>(value: ObjectT, field: string): ObjectT {
  if (!isObject(value)) {
    throw invalidRequest(`must be an object, not ${nameOf(value)}`, field);
  }
  return value;
}

/** The items of `value`, likewise. */
function listed<ItemT>(value: readonly ItemT[], field: string): ItemT[] {
  if (!isObject(value) || typeof value[Symbol.iterator] !== "function") {
    throw invalidRequest(`must be a list, not ${nameOf(value)}`, field);
  }
  return [...value];
}

function nameOf(value: unknown): string {
  return value === null ? "null" : typeof value;
}

function makeDuration(milliseconds: number, field: string): Duration {
  if (!(milliseconds >= 0 && Number.isFinite(milliseconds))) {
    throw invalidRequest("must be a number of milliseconds, not negative", field);
  }
  const seconds = Math.floor(milliseconds / 1000);
  return create(DurationSchema, { seconds: BigInt(seconds), nanos: Math.floor((milliseconds - seconds * 1000) * 1e6) });
}
