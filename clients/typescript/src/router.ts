// The connection to a router.
import { Code, ConnectError, createClient, type Client } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { isIP, isIPv6 } from "node:net";
import { connect, type TLSSocket } from "node:tls";

import { fromCallError, invalidRequest, routerUnavailable, type QuartetError } from "./errors.js";
import { RouterService } from "./gen/quartet/v1/router_pb.js";

/** A router ends a request at its timeout and says so. The client cuts off only a router that fails to, so much later. */
export const DEADLINE_GRACE_MS = 2_000;

/** Within this a router must accept a connection, name resolution and TLS included. */
const CONNECT_TIMEOUT_MS = 3_000;
/** A router that answers no ping for both of these together is gone. Routers allow a ping in 5 s. */
const PING_INTERVAL_MS = 10_000;
const PING_TIMEOUT_MS = 5_000;
/** Of the longest message that comes down. */
const MAX_MESSAGE_BYTES = 64 << 20;

/** How a client proves who it is, and what it takes for proof. Files as their contents, in PEM. */
export interface TlsOptions {
  /** The authorities whose certificates count. Default: those that Node knows. */
  ca?: string | Uint8Array;
  /** The client's own certificate, where routers want one. */
  cert?: string | Uint8Array;
  /** Its private key. */
  key?: string | Uint8Array;
  /** The name that the router's certificate must have. Default: the host of its address. */
  serverName?: string;
}

/** A router's address and the connection to it, which is made when it is first used, and again after each loss. */
export class Router {
  /** Its methods, as the contracts have them; they throw connect's `ConnectError`. */
  readonly stub: Client<typeof RouterService>;
  readonly #connection: Http2SessionManager;
  #isClosed = false;

  /** @throws QuartetError: `address` is not `host:port`. */
  constructor(
    readonly address: string,
    tls?: TlsOptions,
  ) {
    const [host, port] = split(address);
    const baseUrl = `${tls ? "https" : "http"}://${address}`;
    this.#connection = new Http2SessionManager(
      baseUrl,
      { pingIntervalMs: PING_INTERVAL_MS, pingTimeoutMs: PING_TIMEOUT_MS, pingIdleConnection: true },
      tls && { createConnection: () => connectTls(host, port, tls) },
    );
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
    return this.#isClosed ? routerUnavailable("the client was closed", error) : fromCallError(error, this.address);
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
    const why = cause === undefined ? "the connection was closed" : ConnectError.from(cause).rawMessage.trim();
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

/** A connection by TLS. Left to itself, Node 18 would send an address as the name of its host, which is not allowed. */
function connectTls(host: string, port: number, { ca, cert, key, serverName }: TlsOptions): TLSSocket {
  const files = Object.entries({ ca, cert, key }).flatMap(([name, file]) =>
    file === undefined ? [] : [[name, typeof file === "string" ? file : Buffer.from(file)] as const],
  );
  const servername = serverName ?? (isIP(host) ? "" : host);
  return connect({ host, port, servername, ALPNProtocols: ["h2"], ...Object.fromEntries(files) });
}
