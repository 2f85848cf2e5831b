// A request as a call of its own.
import { create } from "@bufbuild/protobuf";

import type { AnswerPart, RunningRequest } from "./answer.js";
import { protocolViolation } from "./errors.js";
import { GenerateRequestSchema, type GenerateRequest, type GenerateStart } from "./gen/quartet/v1/router_pb.js";
import { cutOffMs, type Router } from "./router.js";
import { Uploads } from "./uploads.js";

/** One request by `Generate`. */
export class GenerateCall implements RunningRequest {
  readonly #router: Router;
  readonly #start: GenerateStart;
  readonly #timeoutMs: number | undefined;
  readonly #traceparent: string;
  readonly #uploads = new Uploads<GenerateRequest>();

  constructor(router: Router, start: GenerateStart, timeoutMs?: number, traceparent = "") {
    this.#router = router;
    this.#start = start;
    this.#timeoutMs = timeoutMs;
    this.#traceparent = traceparent;
    this.#uploads.push(create(GenerateRequestSchema, { message: { case: "start", value: start } }));
  }

  cancel(): void {
    this.#uploads.push(create(GenerateRequestSchema, { message: { case: "cancel", value: {} } }));
    this.#uploads.end();
  }

  async *parts(dropped: AbortSignal): AsyncGenerator<AnswerPart, void, undefined> {
    const ended = new AbortController();
    const drop = (): void => ended.abort();
    dropped.addEventListener("abort", drop);
    let numUnfinished = this.#start.numChoices ?? 1;
    try {
      await this.#router.connect(dropped);
      const call = this.#router.stub.generate(this.#uploads, {
        signal: ended.signal,
        ...(this.#timeoutMs !== undefined && { timeoutMs: cutOffMs(this.#timeoutMs) }),
        ...(this.#traceparent && { headers: { traceparent: this.#traceparent } }),
      });
      for await (const { message } of call) {
        if (message.case === undefined) {
          continue; // of a later version
        }
        numUnfinished -= message.case === "finished" ? 1 : 0;
        yield message;
      }
    } catch (error) {
      throw this.#router.toError(error);
    } finally {
      dropped.removeEventListener("abort", drop);
      this.#uploads.end();
      drop();
    }
    if (numUnfinished !== 0) {
      throw protocolViolation("the router ended the answer before all of its choices");
    }
  }
}
