// The client of a Quartet router.
import type { Client } from "@connectrpc/connect";

import { AnswerStream, collect, type Completion } from "./answer.js";
import type { TlsOptions } from "./connection.js";
import type { RouterService } from "./gen/quartet/v1/router_pb.js";
import { GenerateCall } from "./generate.js";
import { makeStart, type GenerateOptions, type Prompt } from "./request.js";
import { Router } from "./router.js";
import { Session } from "./session.js";

/**
 * Talks to one router.
 *
 * ```ts
 * const client = new QuartetClient("127.0.0.1:50050");
 * for await (const part of client.generate("Once upon a time", { sampling: { maxTokens: 32 } })) {
 *   if (part.case === "delta") process.stdout.write(part.value.text);
 * }
 * client.close();
 * ```
 */
export class QuartetClient {
  readonly #router: Router;
  readonly #sessions = new Set<Session>();

  /**
   * @param address - `host:port`; an IPv6 address in brackets. The client dials it when it is first used.
   * @param options - `tls`: encrypts, and says who may be on either side. Default: no TLS.
   * @throws QuartetError: the address is malformed, or a file of `tls` is; names the field.
   */
  constructor(address: string, options: { tls?: TlsOptions } = {}) {
    this.#router = new Router(address, options.tls);
  }

  /** All methods of the router as the contracts have them, such as `listWorkers({})`; they throw `ConnectError`. */
  get stub(): Client<typeof RouterService> {
    return this.#router.stub;
  }

  /**
   * Streams the answer, by a call of its own.
   *
   * @throws QuartetError: no router could take the request; names the field. Nothing was sent.
   */
  generate(prompt: Prompt, options: GenerateOptions = {}): AnswerStream {
    const start = makeStart(prompt, options);
    const call = new GenerateCall(this.#router, start, options.timeoutMs, options.traceparent);
    return new AnswerStream(call, options.signal);
  }

  /** The whole answer; arguments and errors are those of `generate`. */
  async complete(prompt: Prompt, options: GenerateOptions = {}): Promise<Completion> {
    return collect(this.generate(prompt, options));
  }

  /** A stream for many requests, for gateways: one costs less than by `generate`. */
  session(): Session {
    const session: Session = new Session(this.#router, () => this.#sessions.delete(session));
    this.#sessions.add(session);
    return session;
  }

  /** Ends all requests and the connection. */
  close(): void {
    for (const session of this.#sessions) {
      session.close();
    }
    this.#router.close();
  }
}
