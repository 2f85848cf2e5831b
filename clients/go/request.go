package quartet

import (
	"context"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	pb "quartet/codegen/gen/go/quartet/v1"
)

// Messages of the contract, under the names that they have here.
type (
	// Request is what to continue, and how.
	Request = pb.GenerateStart
	// Part is a part of an answer. GetAccepted, GetPlaced, GetDelta, GetFinished and GetPromptLogprobs give what it
	// holds, and nil for the others; getters of nil give zero values, as in part.GetDelta().GetText().
	Part = pb.GenerateResponse
	// Message is one message of a conversation.
	Message = pb.ChatMessage
	// Sampling says how tokens are chosen.
	Sampling = pb.Sampling
)

const traceparentKey = "traceparent"

// Text is a request to continue a text.
func Text(text string) *Request {
	return &Request{Prompt: &pb.GenerateStart_Text{Text: text}}
}

// Chat is a request for the next message of a conversation, which the model's chat template lays out.
func Chat(messages ...*Message) *Request {
	return &Request{Prompt: &pb.GenerateStart_Chat{Chat: &pb.ChatPrompt{Messages: messages}}}
}

// Tokens is a request to continue token ids.
func Tokens(ids ...uint32) *Request {
	return &Request{Prompt: &pb.GenerateStart_TokenIds{TokenIds: &pb.TokenIds{Ids: ids}}}
}

// User is a message of the user about pictures, each the bytes of a file (PNG, JPEG, WebP or GIF), or about none.
func User(text string, pictures ...[]byte) *Message {
	if len(pictures) == 0 {
		return &Message{Role: "user", Content: text}
	}
	parts := make([]*pb.ContentPart, 0, len(pictures)+1)
	for _, picture := range pictures {
		media := &pb.MediaPart{Source: &pb.MediaPart_Data{Data: picture}}
		parts = append(parts, &pb.ContentPart{Part: &pb.ContentPart_Media{Media: media}})
	}
	parts = append(parts, &pb.ContentPart{Part: &pb.ContentPart_Text{Text: text}})
	return &Message{Role: "user", Parts: parts}
}

// System is a message that says how to answer.
func System(text string) *Message { return &Message{Role: "system", Content: text} }

// Assistant is an earlier answer of the conversation.
func Assistant(text string) *Message { return &Message{Role: "assistant", Content: text} }

// Greedy takes the most likely tokens, maxTokens at most.
func Greedy(maxTokens uint32) *Sampling {
	return &Sampling{Temperature: proto.Float32(0), MaxTokens: proto.Uint32(maxTokens)}
}

// WithTraceparent is ctx for requests that belong to the caller's span, by its W3C trace context. It is gRPC's metadata
// of that name, which instrumentation may set as well.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, traceparentKey, traceparent)
}

// traceparentOf is the last one that was set; "": none was.
func traceparentOf(ctx context.Context) string {
	outgoing, _ := metadata.FromOutgoingContext(ctx)
	if values := outgoing.Get(traceparentKey); len(values) > 0 {
		return values[len(values)-1]
	}
	return ""
}
