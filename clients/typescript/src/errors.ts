// How requests fail: one error type, whatever failed.
import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Duration } from "@bufbuild/protobuf/wkt";
import type { Failure } from "./gen/quartet/v1/types_pb.js";

const DOMAIN = "quartet";

/** What is known of a failure beside its code, reason and message. */
export interface ErrorFields {
  /** Path of the request's field at fault, such as `sampling.top_p`. */
  field?: string | undefined;
  /** When trying again makes sense, in milliseconds from now. */
  retryAfterMs?: number | undefined;
  /** What was caught. */
  cause?: unknown;
}

/** A request that failed, at the router or on the way there. */
export class QuartetError extends Error {
  override readonly name = "QuartetError";
  /** Path of the request's field at fault, such as `sampling.top_p`, if there is one. */
  readonly field: string | undefined;
  /** When trying again makes sense, in milliseconds from now, if that is known. */
  readonly retryAfterMs: number | undefined;

  /**
   * @param code - The gRPC status code.
   * @param reason - Stable name in UPPER_SNAKE_CASE that programs can match on, such as `QUEUE_FULL`. Empty: the server
   *   that failed is none of Quartet's.
   * @param message - One sentence for a person.
   */
  constructor(
    readonly code: Code,
    readonly reason: string,
    message: string,
    fields: ErrorFields = {},
  ) {
    super(message, { cause: fields.cause });
    this.field = fields.field;
    this.retryAfterMs = fields.retryAfterMs;
  }
}

/** The error of a request that no router could take; `field` names what is wrong with it. */
export function invalidRequest(message: string, field: string): QuartetError {
  return new QuartetError(Code.InvalidArgument, "INVALID_FIELD", message, { field });
}

/** The error of messages in a wrong order or shape. */
export function protocolViolation(message: string): QuartetError {
  return new QuartetError(Code.Internal, "PROTOCOL_VIOLATION", message);
}

/** The error of a request whose router can't be reached, or was lost. */
export function routerUnavailable(message: string, cause?: unknown): QuartetError {
  return new QuartetError(Code.Unavailable, "ROUTER_UNAVAILABLE", message, { cause });
}

/** The error of a failed call to the router at `address`; `reasonOf` says why a connection broke. */
export function fromCallError(error: unknown, address: string, reasonOf: (error: ConnectError) => string): QuartetError {
  if (error instanceof QuartetError) {
    return error;
  }
  const failed = ConnectError.from(error);
  if (failed.metadata.has("grpc-status")) {
    return fromStatus(failed);
  }
  switch (failed.code) {
    case Code.Unavailable:
    case Code.Aborted:
    case Code.Canceled:
    case Code.Internal:
    case Code.Unknown: // None of these came from the router: the connection broke.
      return routerUnavailable(`lost the router at ${address}: ${reasonOf(failed)}`, failed);
    case Code.DeadlineExceeded:
      return timedOut(failed);
    default:
      return new QuartetError(failed.code, "", failed.rawMessage, { cause: failed });
  }
}

/** The error of a request that the router did not end at its timeout. */
export function timedOut(cause?: unknown): QuartetError {
  const message = "the router did not end the request at its timeout";
  return new QuartetError(Code.DeadlineExceeded, "TIMEOUT", message, { cause });
}

/** The error of one request on a stream of many. */
export function fromFailure(failure: Failure): QuartetError {
  return new QuartetError(failure.code, failure.reason, failure.message, {
    field: failure.field || undefined,
    retryAfterMs: failure.retryDelay && toMilliseconds(failure.retryDelay),
  });
}

function fromStatus(error: ConnectError): QuartetError {
  const [info] = error.findDetails(ErrorInfoSchema);
  const [badRequest] = error.findDetails(BadRequestSchema);
  const [retry] = error.findDetails(RetryInfoSchema);
  return new QuartetError(error.code, info?.domain === DOMAIN ? info.reason : "", error.rawMessage, {
    field: badRequest?.fieldViolations[0]?.field || undefined,
    retryAfterMs: retry?.retryDelay && toMilliseconds(retry.retryDelay),
    cause: error,
  });
}

function toMilliseconds(duration: Duration): number {
  return Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}
