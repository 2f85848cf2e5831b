// A router for tests: real HTTP/2 and gRPC in this process, with the test's own methods behind.
import { create } from "@bufbuild/protobuf";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import type { ServiceImpl } from "@connectrpc/connect";
import { createServer, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";

import { RouterService, SessionResponseSchema, type SessionRequest, type SessionResponse } from "../src/gen/quartet/v1/router_pb.js";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { QuartetClient } from "../src/index.js";

/** Runs `test` with a client of a router that has `methods`; both end with it. */
export async function withRouter(
  methods: Partial<ServiceImpl<typeof RouterService>>,
  test: (client: QuartetClient, breakConnections: () => void, address: string) => Promise<void>,
): Promise<void> {
  const server = createServer(connectNodeAdapter({ routes: (router) => router.service(RouterService, methods) }));
  const connections = new Set<ServerHttp2Session>();
  server.on("session", (session) => connections.add(session));
  const breakConnections = (): void => connections.forEach((session) => session.destroy());
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const address = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  const client = new QuartetClient(address);
  try {
    await test(client, breakConnections, address);
  } finally {
    client.close();
    breakConnections();
    server.close();
  }
}

/** One end of a session whose messages the test sends and awaits. */
export class FakeSession {
  readonly #requests: AsyncIterator<SessionRequest>;
  readonly #responses: SessionResponse[] = [];
  #wake: () => void = () => {};
  #isEnded = false;
  #error: Error | undefined;

  constructor(requests: AsyncIterable<SessionRequest>) {
    this.#requests = requests[Symbol.asyncIterator]();
  }

  /** The next message of the client; `undefined`: it has half-closed. */
  async next(): Promise<SessionRequest["message"] | undefined> {
    const result = await this.#requests.next();
    return result.done ? undefined : result.value.message;
  }

  /** The slot of the client's next message, which must be a start. */
  async nextStart(): Promise<number> {
    const message = await this.next();
    if (message?.case !== "start") {
      throw new Error(`a start was to come, not ${message?.case}`);
    }
    return message.value.slot;
  }

  send(response: MessageInitShape<typeof SessionResponseSchema>): void {
    this.#responses.push(create(SessionResponseSchema, response));
    this.#wake();
  }

  /** Ends it, with a status if there is an `error`. */
  end(error?: Error): void {
    this.#isEnded = true;
    this.#error = error;
    this.#wake();
  }

  /** What goes down; the method's result. */
  async *responses(): AsyncGenerator<SessionResponse> {
    for (;;) {
      for (let response = this.#responses.shift(); response; response = this.#responses.shift()) {
        yield response;
      }
      if (this.#error) {
        throw this.#error;
      }
      if (this.#isEnded) {
        return;
      }
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}

/** Sessions in the order in which clients open them. */
export class FakeSessions {
  readonly #opened: FakeSession[] = [];
  #wake: () => void = () => {};

  /** The method of the service. */
  readonly method = (requests: AsyncIterable<SessionRequest>): AsyncIterable<SessionResponse> => {
    const session = new FakeSession(requests);
    this.#opened.push(session);
    this.#wake();
    return session.responses();
  };

  async next(): Promise<FakeSession> {
    for (;;) {
      const session = this.#opened.shift();
      if (session) {
        return session;
      }
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}
