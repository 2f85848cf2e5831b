package quartet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "quartet/codegen/gen/go/quartet/v1"
)

// Reasons that this package gives itself, or looks at.
const (
	reasonUnavailable = "ROUTER_UNAVAILABLE"
	reasonIdle        = "SESSION_IDLE"
	reasonStalled     = "STREAM_STALLED"
	reasonProtocol    = "PROTOCOL_VIOLATION"
	reasonDraining    = "DRAINING"
	reasonInvalid     = "INVALID_FIELD"
	reasonTooLarge    = "MESSAGE_TOO_LARGE"
)

// Error is how a request failed.
type Error struct {
	// Code is gRPC's.
	Code codes.Code
	// Reason is Quartet's code, such as QUEUE_FULL, for programs to match on; ROUTER_UNAVAILABLE: no router answers, or
	// the connection was lost. Empty: the error is gRPC's own.
	Reason string
	// Message is one sentence for a person.
	Message string
	// Field is the path of the field at fault, such as sampling.top_p. Empty: none is.
	Field string
	// RetryAfter is the time after which to try again. 0: not known.
	RetryAfter time.Duration
}

// Error is all of it in one line.
func (e *Error) Error() string {
	words := []string{"quartet:", e.Code.String()}
	if e.Reason != "" {
		words = append(words, e.Reason)
	}
	text := strings.Join(words, " ") + ": " + e.Message
	if e.Field != "" {
		text += fmt.Sprintf(" (%s)", e.Field)
	}
	if e.RetryAfter > 0 {
		text += fmt.Sprintf("; try again after %v", e.RetryAfter.Round(time.Millisecond))
	}
	return text
}

// GRPCStatus lets status.Code and the like know its code.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// ToError makes an *Error of what a stub returned; nil stays nil.
func ToError(err error) error {
	var ours *Error
	if err == nil || errors.As(err, &ours) {
		return err
	}
	found := status.Convert(err)
	ours = &Error{Code: found.Code(), Message: found.Message()}
	if ours.Code == codes.Unavailable {
		ours.Reason = reasonUnavailable // unless the router itself gives another one
	}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			ours.Reason = detail.GetReason()
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				ours.Field = violation.GetField()
			}
		case *errdetails.RetryInfo:
			ours.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	return ours
}

// errorOf is the error of a request whose stream ended with err: if the caller ended it, that comes first.
func errorOf(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return ToError(err)
}

func failureError(failure *pb.Failure) *Error {
	return &Error{
		Code:       codes.Code(failure.GetCode()),
		Reason:     failure.GetReason(),
		Message:    failure.GetMessage(),
		Field:      failure.GetField(),
		RetryAfter: failure.GetRetryDelay().AsDuration(),
	}
}

// invalid is the error of a request that no router could take.
func invalid(field, format string, values ...any) *Error {
	return &Error{
		Code: codes.InvalidArgument, Reason: reasonInvalid, Message: fmt.Sprintf(format, values...), Field: field,
	}
}

func protocolError(format string, values ...any) *Error {
	return &Error{Code: codes.Internal, Reason: reasonProtocol, Message: fmt.Sprintf(format, values...)}
}
