// What has come of one answer and was not read yet.
import { Code } from "@connectrpc/connect";

import { append, type AnswerPart } from "./answer.js";
import { QuartetError } from "./errors.js";
import type { Delta } from "./gen/quartet/v1/router_pb.js";

/** Tokens and characters of one choice that may wait for a slow reader. */
const MAX_UNREAD = 1 << 16;

/** Parts in order, for one reader who may be slow: what comes of a choice meanwhile becomes one delta. */
export class AnswerBuffer {
  readonly #parts: AnswerPart[] = [];
  /** By choice, the delta that waits, and how many tokens and characters it holds. */
  readonly #waiting = new Map<number, { delta: Delta; size: number }>();
  #isEnded = false;
  #error: QuartetError | undefined;
  #wake: () => void = () => {};

  get isEnded(): boolean {
    return this.#isEnded;
  }

  /** Adds a part, unless the answer has ended. Throws `QuartetError`: too much waits. */
  add(part: AnswerPart): void {
    if (this.#isEnded) {
      return;
    }
    if (part.case !== "delta" || !this.#merge(part.value)) {
      this.#parts.push(part);
    }
    this.#wake();
  }

  /** Nothing comes any more; with `error`, the answer failed, and what waits is dropped. Only the first end counts. */
  end(error?: QuartetError): void {
    if (this.#isEnded) {
      return;
    }
    this.#isEnded = true;
    this.#error = error;
    if (error) {
      this.#parts.length = 0;
      this.#waiting.clear();
    }
    this.#wake();
  }

  /** Waits for the next part; `undefined` at the end. Throws the error that the answer ended with. */
  async take(): Promise<AnswerPart | undefined> {
    while (this.#parts.length === 0 && !this.#isEnded) {
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
    if (this.#error) {
      throw this.#error;
    }
    const part = this.#parts.shift();
    if (part?.case === "delta") {
      this.#waiting.delete(part.value.choice);
    }
    return part;
  }

  /** Puts `more` behind the delta of its choice that waits; returns whether there is one. */
  #merge(more: Delta): boolean {
    const waiting = this.#waiting.get(more.choice);
    const size = (waiting?.size ?? 0) + sizeOf(more);
    if (size > MAX_UNREAD) {
      throw new QuartetError(Code.Aborted, "STREAM_STALLED", `more than ${MAX_UNREAD} tokens and characters were left unread`);
    }
    if (!waiting) {
      this.#waiting.set(more.choice, { delta: more, size });
      return false;
    }
    const { delta } = waiting;
    waiting.size = size;
    if (delta.tokenIds.length === 0 && more.tokenIds.length > 0) {
      delta.tokenOffset = more.tokenOffset;
    }
    append(delta.tokenIds, more.tokenIds);
    append(delta.logprobs, more.logprobs);
    append(delta.toolCalls, more.toolCalls);
    delta.text += more.text;
    delta.reasoning += more.reasoning;
    return true;
  }
}

function sizeOf(delta: Delta): number {
  const calls = delta.toolCalls.reduce((size, call) => size + call.name.length + call.arguments.length, 0);
  return delta.tokenIds.length + delta.text.length + delta.reasoning.length + calls;
}
