package quartet

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	pb "quartet/codegen/gen/go/quartet/v1"
)

// newCall is a request in the first slot of a stream that nothing is sent on.
func newCall() (*sessionStream, *sessionCall) {
	stream := newSessionStream(func() {})
	return stream, stream.start(Text("x"), "")
}

func take(t *testing.T, stream *sessionStream, response *pb.SessionResponse) {
	t.Helper()
	if err := stream.take(response); err != nil {
		t.Fatal(err)
	}
}

func next(t *testing.T, call *sessionCall) []*Part {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	parts, err := call.next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return parts
}

func finishedIn(slot uint32) *pb.SessionResponse {
	return &pb.SessionResponse{Finished: []*pb.SessionFinished{{Slot: slot, Finished: &pb.ChoiceFinished{}}}}
}

func TestASlotIsFreeBeforeTheReaderLearnsOfTheEnd(t *testing.T) {
	for name, end := range map[string]*pb.SessionResponse{
		"finished": finishedIn(0),
		"failed":   {Failures: []*pb.SessionFailure{{Failure: &pb.Failure{}}}},
	} {
		stream, call := newCall()
		call.mutex.Lock() // So nothing can be told to the reader.
		taken := make(chan error, 1)
		go func() { taken <- stream.take(end) }()
		for begin := time.Now(); stream.call(0) != nil; time.Sleep(time.Millisecond) {
			if time.Since(begin) > time.Minute {
				t.Fatalf("%s: the slot is in use", name)
			}
		}
		call.mutex.Unlock()
		if err := <-taken; err != nil {
			t.Error(err)
		}
		if again := stream.start(Text("y"), ""); again.slot != 0 {
			t.Errorf("%s: the next request is in slot %d", name, again.slot)
		}
	}
}

func TestMergingLeavesTheTokensOfOtherSlotsAlone(t *testing.T) {
	stream, first := newCall()
	second := stream.start(Text("y"), "")
	take(t, stream, &pb.SessionResponse{
		Slots: []uint32{0, 1}, NumTokens: []uint32{1, 2}, TokenOffsets: []uint32{0, 0}, TokenIds: []uint32{1, 2, 3},
	})
	take(t, stream, &pb.SessionResponse{
		Slots: []uint32{0}, NumTokens: []uint32{1}, TokenOffsets: []uint32{1}, TokenIds: []uint32{9},
	})
	got := [][]uint32{next(t, first)[0].GetDelta().GetTokenIds(), next(t, second)[0].GetDelta().GetTokenIds()}
	if fmt.Sprint(got) != "[[1 9] [2 3]]" {
		t.Errorf("got %v", got)
	}
}

func TestWhatIsMergedKeepsItsTextItsLogprobsAndItsFirstOffset(t *testing.T) {
	stream, call := newCall()
	for number, text := range []string{"a", "b"} {
		ids := []uint32{uint32(7 + number)}
		take(t, stream, &pb.SessionResponse{
			Slots: []uint32{0}, NumTokens: []uint32{1}, TokenOffsets: []uint32{uint32(3 + number)}, TokenIds: ids,
			Texts:    []string{text},
			Logprobs: []*pb.SessionLogprobs{{Tokens: []*pb.TokenLogprobs{{TokenId: ids[0]}}}},
		})
	}
	parts := next(t, call)
	if len(parts) != 1 {
		t.Fatalf("got %v", parts)
	}
	delta := parts[0].GetDelta()
	ids := []uint32{}
	for _, logprobs := range delta.GetLogprobs() {
		ids = append(ids, logprobs.GetTokenId())
	}
	if got := fmt.Sprintln(delta.GetText(), delta.GetTokenOffset(), delta.GetTokenIds(), ids); got != "ab 3 [7 8] [7 8]\n" {
		t.Errorf("got %s", got)
	}
}

// mostUnread are messages that bring as much as may wait, each of another kind.
func mostUnread() map[string]*pb.SessionResponse {
	parsed := func(parsed *pb.SessionParsed) *pb.SessionResponse {
		return &pb.SessionResponse{Parsed: []*pb.SessionParsed{parsed}}
	}
	column := func(numTokens int, text string) *pb.SessionResponse {
		return &pb.SessionResponse{
			Slots: []uint32{0}, NumTokens: []uint32{uint32(numTokens)}, TokenOffsets: []uint32{0},
			TokenIds: make([]uint32, numTokens), Texts: []string{text},
		}
	}
	arguments := &pb.ToolCallDelta{Arguments: strings.Repeat("x", maxUnread-1)}
	return map[string]*pb.SessionResponse{
		"tokens":    column(maxUnread, ""),
		"text":      column(0, strings.Repeat("é", maxUnread)),
		"reasoning": parsed(&pb.SessionParsed{Reasoning: strings.Repeat("x", maxUnread)}),
		"arguments": parsed(&pb.SessionParsed{ToolCalls: []*pb.ToolCallDelta{arguments}}),
	}
}

func TestAllThatIsUnreadCountsUntilItIsRead(t *testing.T) {
	for name, most := range mostUnread() {
		stream, call := newCall()
		for range 3 { // As much again each time it was read.
			take(t, stream, most)
			next(t, call)
		}
		take(t, stream, most)
		take(t, stream, &pb.SessionResponse{Slots: []uint32{0}, NumTokens: []uint32{1}, TokenOffsets: []uint32{0}, TokenIds: []uint32{1}})
		_, err := call.next(t.Context())
		if failure, isOurs := err.(*Error); !isOurs || failure.Reason != reasonStalled {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestAnAnswerIsOverOnceAllItsChoicesAre(t *testing.T) {
	stream := newSessionStream(func() {})
	numChoices := uint32(2)
	call := stream.start(&Request{NumChoices: &numChoices}, "")
	take(t, stream, finishedIn(0))
	if parts := next(t, call); len(parts) != 1 || stream.call(0) != call {
		t.Errorf("got %v", parts)
	}
	take(t, stream, finishedIn(0))
	next(t, call)
	if _, err := call.next(t.Context()); err != io.EOF {
		t.Errorf("got %v", err)
	}
}

// slowToEnd is a router's stub whose streams never open, and take their time to notice that they are not wanted.
type slowToEnd struct {
	pb.RouterServiceClient
	hasEnded bool
}

func (s *slowToEnd) Session(ctx context.Context, _ ...grpc.CallOption) (pb.RouterService_SessionClient, error) {
	<-ctx.Done()
	time.Sleep(time.Second)
	s.hasEnded = true
	return nil, ctx.Err()
}

func TestNothingOfASessionRunsOnceItWasClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stub := &slowToEnd{}
		session := &Session{stub: stub, open: map[*sessionStream]bool{}}
		call, err := session.start(t.Context(), Text("x"))
		if err != nil {
			t.Fatal(err)
		}
		session.Close()
		if !stub.hasEnded || len(session.open) != 0 {
			t.Errorf("%d streams are open", len(session.open))
		}
		if _, err := call.next(t.Context()); err == nil || err.(*Error).Reason != "CANCELLED" {
			t.Errorf("got %v", err)
		}
	})
}
