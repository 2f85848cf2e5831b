// The answer to one request: a stream of parts, or all of it put together.
import { setMaxListeners } from "node:events";

import { protocolViolation } from "./errors.js";
import type { Accepted, ChoiceFinished, ChoicePlacement, GenerateResponse } from "./gen/quartet/v1/router_pb.js";
import type { PromptLogprobs, TokenLogprobs } from "./gen/quartet/v1/types_pb.js";
import type { ToolCall } from "./request.js";

/**
 * One part of an answer, told apart by `case`: `accepted` comes first, then `delta`s, and a `finished` for each choice.
 *
 * For a choice that waited for room longer than the first, `placed` comes before its first `delta`. `promptLogprobs`, if
 * they were asked for, come before the first `delta` of choice 0.
 */
export type AnswerPart = Exclude<GenerateResponse["message"], { case: undefined }>;

/** One request, however it is sent. */
export interface RunningRequest {
  /** Sends the request and yields its answer, until `dropped` aborts. However it ends, the request ends with it. */
  parts(dropped: AbortSignal): AsyncGenerator<AnswerPart, void, undefined>;
  /** Asks the router for an early end; may come before `parts` is iterated, and twice. */
  cancel(): void;
}

/**
 * An answer as it comes; iterate it once. The request is sent when the first part is asked for. Leaving the loop, or an
 * abort of its signal, drops the request at once; the latter throws the signal's reason.
 *
 * Iterating throws `QuartetError`.
 */
export class AnswerStream implements AsyncIterableIterator<AnswerPart> {
  readonly #request: RunningRequest;
  readonly #signal: AbortSignal | undefined;
  readonly #drop = new AbortController();
  readonly #parts: AsyncGenerator<AnswerPart, void, undefined>;

  /** The methods `generate` make it. */
  constructor(request: RunningRequest, signal?: AbortSignal) {
    this.#request = request;
    this.#signal = signal;
    if (signal) {
      setMaxListeners(0, signal); // one signal may end any number of requests; Node would take ten for a leak
    }
    this.#parts = this.#iterate();
  }

  next(): Promise<IteratorResult<AnswerPart, void>> {
    return this.#parts.next();
  }

  /** Drops the request, whatever its state. */
  return(): Promise<IteratorResult<AnswerPart, void>> {
    // A generator ends only after the part that it waits for: that must not be waited for.
    this.#drop.abort();
    return this.#parts.return();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** Asks for an early end. Each running choice still gets its `finished`, so continue to iterate. */
  cancel(): void {
    this.#request.cancel();
  }

  async *#iterate(): AsyncGenerator<AnswerPart, void, undefined> {
    const signal = this.#signal;
    signal?.throwIfAborted();
    const drop = (): void => this.#drop.abort();
    signal?.addEventListener("abort", drop);
    try {
      yield* this.#request.parts(this.#drop.signal);
    } catch (error) {
      signal?.throwIfAborted();
      if (!this.#drop.signal.aborted) {
        throw error;
      }
    } finally {
      signal?.removeEventListener("abort", drop);
    }
  }
}

/** One whole answer. */
export interface CompletedChoice {
  text: string;
  tokenIds: number[];
  /** One entry a token, if they were asked for. */
  logprobs: TokenLogprobs[];
  /** What the model thought before it. */
  reasoning: string;
  /** Those that are complete, to be run. */
  toolCalls: Required<ToolCall>[];
  finished: ChoiceFinished;
}

/** All answers to a request. */
export interface Completion {
  /** The text of the first choice. */
  text: string;
  /** In order. */
  choices: CompletedChoice[];
  /** With every placed choice, also those placed later. */
  accepted: Accepted;
  /** Of the prompt's tokens, if they were asked for. */
  promptLogprobs?: PromptLogprobs;
}

type PartialCall = Required<ToolCall> & { isComplete: boolean };

interface PartialChoice extends Omit<CompletedChoice, "toolCalls" | "finished"> {
  toolCalls: PartialCall[];
  finished?: ChoiceFinished;
}

/** Waits for the whole answer. Throws `QuartetError`, also where parts of it are missing. */
export async function collect(parts: AsyncIterable<AnswerPart>): Promise<Completion> {
  let accepted: Accepted | undefined;
  let promptLogprobs: PromptLogprobs | undefined;
  const placed: ChoicePlacement[] = [];
  const choices = new Map<number, PartialChoice>();
  for await (const part of parts) {
    switch (part.case) {
      case "accepted":
        accepted = part.value;
        break;
      case "placed":
        placed.push(part.value);
        break;
      case "promptLogprobs":
        promptLogprobs = part.value;
        break;
      case "delta":
        addDelta(choiceOf(choices, part.value.choice), part);
        break;
      case "finished":
        choiceOf(choices, part.value.choice).finished = part.value;
    }
  }
  if (!accepted) {
    throw protocolViolation("the router answered without accepting the request");
  }
  const byNumber = (one: ChoicePlacement, other: ChoicePlacement): number => one.choice - other.choice;
  const completed = [...choices].sort(([one], [other]) => one - other).map(([, choice]) => completeChoice(choice));
  return {
    text: completed[0]?.text ?? "",
    choices: completed,
    accepted: { ...accepted, choices: [...accepted.choices, ...placed].sort(byNumber) },
    ...(promptLogprobs && { promptLogprobs }),
  };
}

function choiceOf(choices: Map<number, PartialChoice>, number: number): PartialChoice {
  let choice = choices.get(number);
  if (!choice) {
    choice = { text: "", tokenIds: [], logprobs: [], reasoning: "", toolCalls: [] };
    choices.set(number, choice);
  }
  return choice;
}

function addDelta(choice: PartialChoice, { value: delta }: Extract<AnswerPart, { case: "delta" }>): void {
  if (delta.tokenIds.length && delta.tokenOffset !== choice.tokenIds.length) {
    throw protocolViolation(`tokens before number ${delta.tokenOffset} of the answer are missing`);
  }
  choice.text += delta.text;
  append(choice.tokenIds, delta.tokenIds);
  append(choice.logprobs, delta.logprobs);
  choice.reasoning += delta.reasoning;
  for (const more of delta.toolCalls) {
    const call = (choice.toolCalls[more.index] ??= { id: "", name: "", arguments: "", isComplete: false });
    call.id ||= more.id;
    call.name ||= more.name;
    call.arguments += more.arguments;
    call.isComplete ||= more.isComplete;
  }
}

function completeChoice({ finished, toolCalls, ...choice }: PartialChoice): CompletedChoice {
  if (!finished) {
    throw protocolViolation("the router ended the answer before all of its choices");
  }
  const complete = toolCalls.filter((call) => call.isComplete);
  return { ...choice, toolCalls: complete.map(({ isComplete: _, ...call }) => call), finished };
}

/** Adds `more` to `list`; thousands may come at once, too many for the arguments of one call of `push`. */
export function append<ItemT>(list: ItemT[], more: readonly ItemT[]): void {
  for (const item of more) {
    list.push(item);
  }
}
