// The connection to a router.
import { Code, ConnectError, createClient, type Client } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { isIPv6 } from "node:net";

import { Connection, messageOf, type TlsOptions } from "./connection.js";
import { fromCallError, invalidRequest, routerUnavailable, type QuartetError } from "./errors.js";
import { RouterService } from "./gen/quartet/v1/router_pb.js";

/** A router ends a request at its timeout and says so. The client cuts off only a router that fails to, so much later. */
const DEADLINE_GRACE_MS = 2_000;
/** Of Node's timers: one that is set to more fires at once. */
const MAX_TIMER_MS = 2 ** 31 - 1;

/** Within this a router must accept a connection, name resolution and TLS included. */
const CONNECT_TIMEOUT_MS = 3_000;
/** Of the longest message that comes down. */
const MAX_MESSAGE_BYTES = 64 << 20;

/** A router's address and the connection to it, which is made when it is first used, and again after each loss. */
export class Router {
  /** Its methods, as the contracts have them; they throw connect's `ConnectError`. */
  readonly stub: Client<typeof RouterService>;
  readonly #connection: Connection;
  #isClosed = false;

  /** @throws QuartetError: `address` is not `host:port`, or a file of `tls` is none. */
  constructor(
    readonly address: string,
    tls?: TlsOptions,
  ) {
    const [host, port] = split(address);
    const baseUrl = `${tls ? "https" : "http"}://${address}`;
    this.#connection = new Connection(baseUrl, host, port, tls);
    const transport = createGrpcTransport({
      baseUrl,
      sessionManager: this.#connection,
      readMaxBytes: MAX_MESSAGE_BYTES,
    });
    this.stub = createClient(RouterService, transport);
  }

  /**
   * Waits until calls can be sent.
   *
   * @throws QuartetError: nothing answers there, or not in time; or the client was closed.
   */
  async connect(dropped: AbortSignal): Promise<void> {
    if (this.#isClosed) {
      throw routerUnavailable("the client was closed");
    }
    let giveUp = (): void => {};
    const givenUp = new Promise<"dropped" | "late">((resolve) => {
      const timer = setTimeout(() => resolve("late"), CONNECT_TIMEOUT_MS);
      const drop = (): void => resolve("dropped");
      dropped.addEventListener("abort", drop);
      giveUp = () => {
        clearTimeout(timer);
        dropped.removeEventListener("abort", drop);
      };
    });
    const state = await Promise.race([this.#connection.connect(), givenUp]).finally(giveUp);
    if (dropped.aborted) {
      throw routerUnavailable("the request was dropped");
    }
    if (state === "late" || state === "error") {
      throw this.#unreachable(state === "late");
    }
  }

  /** The error of a call that failed. */
  toError(error: unknown): QuartetError {
    if (this.#isClosed) {
      return routerUnavailable("the client was closed", error);
    }
    return fromCallError(error, this.address, (lost) => this.#connection.reason(lost));
  }

  /** Ends all calls and the connection, for good. */
  close(): void {
    this.#isClosed = true;
    this.#connection.abort();
  }

  #unreachable(isLate: boolean): QuartetError {
    if (this.#isClosed) {
      return routerUnavailable("the client was closed");
    }
    if (isLate) {
      if (this.#connection.state() === "connecting") {
        // Or the next call would wait for this connection, too.
        this.#connection.abort(new ConnectError("no answer in time", Code.Unavailable));
      }
      return routerUnavailable(`no router answers at ${this.address} within ${CONNECT_TIMEOUT_MS / 1000} s`);
    }
    const cause = this.#connection.error();
    const why = cause === undefined ? "the connection was closed" : messageOf(cause);
    return routerUnavailable(`no router answers at ${this.address}: ${why}`, cause);
  }
}

function split(address: string): [host: string, port: number] {
  const [, written = "", port = ""] = /^(.+):(\d{1,5})$/.exec(address) ?? [];
  const host = written.replace(/^\[(.*)\]$/, "$1");
  if (!host || !(Number(port) > 0 && Number(port) < 65536) || (host === written && isIPv6(host)) || !isHost(written)) {
    throw invalidRequest(`a router's address is host:port, not ${JSON.stringify(address)}`, "address");
  }
  return [host, Number(port)];
}

function isHost(written: string): boolean {
  try {
    return new URL(`http://${written}`).host === written.toLowerCase();
  } catch {
    return false;
  }
}

/** After how long the client cuts off a request of this timeout, in whole milliseconds; 24 days are the most. */
export function cutOffMs(timeoutMs: number): number {
  return Math.min(Math.ceil(timeoutMs) + DEADLINE_GRACE_MS, MAX_TIMER_MS);
}
