// Many requests on one stream with a router.
import { create, type MessageInitShape } from "@bufbuild/protobuf";

import { AnswerBuffer } from "./answer-buffer.js";
import { AnswerStream, collect, type AnswerPart, type Completion, type RunningRequest } from "./answer.js";
import { fromFailure, protocolViolation, QuartetError, routerUnavailable, timedOut } from "./errors.js";
import {
  DeltaSchema,
  SessionRequestSchema,
  type GenerateStart,
  type SessionRequest,
  type SessionResponse,
} from "./gen/quartet/v1/router_pb.js";
import { makeStart, type GenerateOptions, type Prompt } from "./request.js";
import { cutOffMs, type Router } from "./router.js";
import { Uploads } from "./uploads.js";

/** A stream without a request for so long is ended from here: routers do so after ten minutes, and a start may meet that. */
const IDLE_TIMEOUT_MS = 60_000;

/**
 * Requests that share one stream with a router. The stream opens at the first request, and again at the next one after
 * it broke. A break fails the requests whose answers had begun; others are sent again, once.
 *
 * The stream is always read, whatever the readers of answers do: what comes for a slow one collects in few parts, and a
 * choice with more than 65,536 unread tokens and characters ends its request with `STREAM_STALLED`.
 */
export class Session {
  readonly #router: Router;
  readonly #onClosed: () => void;
  readonly #idleTimeoutMs: number;
  #stream: SessionStream | undefined;
  #isClosed = false;

  /** `QuartetClient.session` makes it. */
  constructor(router: Router, onClosed: () => void, idleTimeoutMs = IDLE_TIMEOUT_MS) {
    this.#router = router;
    this.#onClosed = onClosed;
    this.#idleTimeoutMs = idleTimeoutMs;
  }

  /** As `QuartetClient.generate`. */
  generate(prompt: Prompt, options: GenerateOptions = {}): AnswerStream {
    const request = new SessionRequestRun(this, makeStart(prompt, options), options.timeoutMs, options.traceparent);
    return new AnswerStream(request, options.signal);
  }

  /** As `QuartetClient.complete`. */
  async complete(prompt: Prompt, options: GenerateOptions = {}): Promise<Completion> {
    return collect(this.generate(prompt, options));
  }

  /** Ends all its requests, for good. */
  close(): void {
    this.#isClosed = true;
    this.#stream?.break(routerUnavailable("the session was closed"));
    this.#onClosed();
  }

  /** Starts a request, for `SessionRequestRun`. Throws `QuartetError`. */
  async start(start: GenerateStart, traceparent: string, dropped: AbortSignal): Promise<SessionCall> {
    await this.#router.connect(dropped);
    if (this.#isClosed) {
      throw routerUnavailable("the session was closed");
    }
    const onEnd = (stream: SessionStream): void => {
      this.#stream = this.#stream === stream ? undefined : this.#stream;
    };
    this.#stream ??= new SessionStream(this.#router, this.#idleTimeoutMs, onEnd);
    return this.#stream.start(start, traceparent);
  }
}

class SessionRequestRun implements RunningRequest {
  readonly #session: Session;
  readonly #start: GenerateStart;
  readonly #timeoutMs: number | undefined;
  readonly #traceparent: string;
  #call: SessionCall | undefined;
  #isCancelled = false;
  #ended: QuartetError | undefined;

  constructor(session: Session, start: GenerateStart, timeoutMs?: number, traceparent = "") {
    this.#session = session;
    this.#start = start;
    this.#timeoutMs = timeoutMs;
    this.#traceparent = traceparent;
  }

  cancel(): void {
    this.#isCancelled = true;
    this.#call?.cancel();
  }

  async *parts(dropped: AbortSignal): AsyncGenerator<AnswerPart, void, undefined> {
    const drop = (): void => this.#end(routerUnavailable("the request was dropped"));
    dropped.addEventListener("abort", drop);
    const deadline =
      this.#timeoutMs === undefined
        ? undefined
        : setTimeout(() => this.#end(timedOut()), cutOffMs(this.#timeoutMs));
    deadline?.unref(); // an answer that nobody reads to its end must not keep the process once the client was closed
    try {
      let part = await this.#firstPart(dropped);
      while (part !== undefined) {
        yield part;
        part = await this.#call?.answer.take();
      }
    } finally {
      clearTimeout(deadline);
      dropped.removeEventListener("abort", drop);
      drop();
    }
  }

  /** Sends the request and waits for the first part; once more, if the stream breaks before that has come. */
  async #firstPart(dropped: AbortSignal): Promise<AnswerPart | undefined> {
    try {
      return await this.#send(dropped);
    } catch (error) {
      if (this.#call === undefined || this.#ended || !isLost(error)) {
        throw error;
      }
      // The stream of earlier requests may have broken under this one.
      return this.#send(dropped);
    }
  }

  async #send(dropped: AbortSignal): Promise<AnswerPart | undefined> {
    this.#call = await this.#session.start(this.#start, this.#traceparent, dropped);
    if (this.#isCancelled) {
      this.#call.cancel();
    }
    if (this.#ended) {
      this.#call.drop(this.#ended); // meanwhile
    }
    return this.#call.answer.take();
  }

  /** Ends it from this side. */
  #end(error: QuartetError): void {
    this.#ended ??= error;
    this.#call?.drop(error);
  }
}

function isLost(error: unknown): boolean {
  return error instanceof QuartetError && ["ROUTER_UNAVAILABLE", "SESSION_IDLE", "DRAINING"].includes(error.reason);
}

/** One request on a stream. */
class SessionCall {
  readonly answer = new AnswerBuffer();
  numUnfinished: number;
  readonly #sendCancel: () => void;

  constructor(numChoices: number, sendCancel: () => void) {
    this.numUnfinished = numChoices;
    this.#sendCancel = sendCancel;
  }

  /** Asks the router to end it; what the router still sends goes to the answer. */
  cancel(): void {
    if (!this.answer.isEnded) {
      this.#sendCancel();
    }
  }

  /** Ends it here at once, and at the router soon; harmless after its end. */
  drop(error: QuartetError): void {
    this.cancel();
    this.answer.end(error);
  }
}

/** One life of the stream. A slot is free again once the router has said how its request ended. */
class SessionStream {
  readonly #uploads = new Uploads<SessionRequest>();
  readonly #calls = new Map<number, SessionCall>();
  readonly #freeSlots: number[] = [];
  readonly #broken = new AbortController();
  readonly #idleTimeoutMs: number;
  readonly #onEnd: (stream: SessionStream) => void;
  #idleTimer: ReturnType<typeof setTimeout> | undefined;

  /** `onEnd` is called once it takes no more requests. */
  constructor(router: Router, idleTimeoutMs: number, onEnd: (stream: SessionStream) => void) {
    this.#idleTimeoutMs = idleTimeoutMs;
    this.#onEnd = onEnd;
    void this.#read(router);
  }

  start(start: GenerateStart, traceparent: string): SessionCall {
    clearTimeout(this.#idleTimer);
    const slot = this.#freeSlots.pop() ?? this.#calls.size;
    const call = new SessionCall(start.numChoices ?? 1, () => {
      if (this.#calls.get(slot) === call) {
        this.#send({ case: "cancel", value: { slot } });
      }
    });
    this.#calls.set(slot, call);
    this.#send({ case: "start", value: { slot, start, traceparent } });
    return call;
  }

  /** Ends it, with all its requests. */
  break(error: QuartetError): void {
    clearTimeout(this.#idleTimer);
    this.#onEnd(this);
    for (const call of this.#calls.values()) {
      call.answer.end(error);
    }
    this.#calls.clear();
    this.#uploads.end();
    this.#broken.abort();
  }

  async #read(router: Router): Promise<void> {
    try {
      for await (const response of router.stub.session(this.#uploads, { signal: this.#broken.signal })) {
        this.#receive(response);
      }
      this.break(routerUnavailable(`the router at ${router.address} ended the session`));
    } catch (error) {
      this.break(router.toError(error));
    }
  }

  #send(message: MessageInitShape<typeof SessionRequestSchema>["message"] & {}): void {
    this.#uploads.push(create(SessionRequestSchema, { message }));
  }

  #receive(response: SessionResponse): void {
    for (const { slot, accepted } of response.accepted) {
      if (accepted) {
        this.#call(slot).answer.add({ case: "accepted", value: accepted });
      }
    }
    for (const { slot, placement } of response.placed) {
      if (placement) {
        this.#call(slot).answer.add({ case: "placed", value: placement });
      }
    }
    for (const { slot, promptLogprobs } of response.promptLogprobs) {
      if (promptLogprobs) {
        this.#call(slot).answer.add({ case: "promptLogprobs", value: promptLogprobs });
      }
    }
    this.#receiveColumns(response);
    for (const { slot, choice, reasoning, toolCalls } of response.parsed) {
      this.#addDelta(slot, { choice, reasoning, toolCalls });
    }
    for (const { slot, finished } of response.finished) {
      const call = this.#call(slot);
      if (finished) {
        call.answer.add({ case: "finished", value: finished });
      }
      if (--call.numUnfinished === 0) {
        this.#end(slot);
        call.answer.end();
      }
    }
    for (const { slot, failure } of response.failures) {
      const call = this.#call(slot);
      this.#end(slot);
      call.answer.end(failure ? fromFailure(failure) : protocolViolation("a failure without its reason"));
    }
  }

  #receiveColumns({ slots, choices, numTokens, tokenOffsets, tokenIds, texts, logprobs }: SessionResponse): void {
    let position = 0;
    let numLogprobs = 0;
    slots.forEach((slot, index) => {
      const choice = choices[index] ?? 0;
      const end = position + (numTokens[index] ?? 0);
      // Entries of the columns that have log probabilities have them in the same order.
      const reported = logprobs[numLogprobs];
      const isReported = reported?.slot === slot && reported.choice === choice;
      numLogprobs += isReported ? 1 : 0;
      this.#addDelta(slot, {
        choice,
        tokenOffset: tokenOffsets[index] ?? 0,
        tokenIds: tokenIds.slice(position, end),
        text: texts[index] ?? "",
        logprobs: isReported ? reported.tokens : [],
      });
      position = end;
    });
    if (position !== tokenIds.length || numLogprobs !== logprobs.length) {
      throw protocolViolation("columns of the session don't fit together");
    }
  }

  #addDelta(slot: number, delta: MessageInitShape<typeof DeltaSchema>): void {
    const call = this.#call(slot);
    try {
      call.answer.add({ case: "delta", value: create(DeltaSchema, delta) });
    } catch (error) {
      if (!(error instanceof QuartetError)) {
        throw error;
      }
      call.drop(error);
    }
  }

  #call(slot: number): SessionCall {
    const call = this.#calls.get(slot);
    if (!call) {
      throw protocolViolation(`the router answered in slot ${slot}, which has no request`);
    }
    return call;
  }

  #end(slot: number): void {
    this.#calls.delete(slot);
    this.#freeSlots.push(slot);
    if (this.#calls.size === 0) {
      this.#idleTimer = setTimeout(() => this.#retire(), this.#idleTimeoutMs);
    }
  }

  /** Half-closes it, without requests: the router then ends it. */
  #retire(): void {
    this.#onEnd(this);
    this.#uploads.end();
  }
}
