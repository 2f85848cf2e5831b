package quartet_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	quartet "quartet/clients/go"
	pb "quartet/codegen/gen/go/quartet/v1"
)

// answering is a fake's session that answers each start as the function says; nil: not at all.
func answering(answer func(*pb.SessionStart) *pb.SessionResponse) func(pb.RouterService_SessionServer) error {
	return func(stream pb.RouterService_SessionServer) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return err
			}
			if start := request.GetStart(); start != nil {
				if response := answer(start); response != nil {
					if err := stream.Send(response); err != nil {
						return err
					}
				}
			}
		}
	}
}

func reasonOf(err error) string {
	var failure *quartet.Error
	if errors.As(err, &failure) {
		return failure.Reason
	}
	return fmt.Sprint(err)
}

func TestManyRequestsOfOneStreamGetTheirOwnAnswers(t *testing.T) {
	var streams sync.Map
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		streams.Store(stream, true)
		return answering(func(start *pb.SessionStart) *pb.SessionResponse {
			return answered(start.GetSlot(), start.GetStart().GetText()+"!")
		})(stream)
	}}))
	ctx := testContext(t)
	var asking sync.WaitGroup
	for number := range 100 {
		asking.Go(func() {
			text := fmt.Sprint(number)
			completion, err := session.Complete(ctx, quartet.Text(text))
			if err != nil || completion.Text() != text+"!" || completion.Accepted.GetSeed() != 7 {
				t.Errorf("%s: got %+v, %v", text, completion, err)
			}
		})
	}
	asking.Wait()
	count := 0
	streams.Range(func(any, any) bool { count++; return true })
	if count != 1 {
		t.Errorf("there were %d streams", count)
	}
}

func TestAllKindsOfPartsComeOutOfASession(t *testing.T) {
	numChoices := uint32(2)
	request := quartet.Text("x")
	request.NumChoices = &numChoices
	logprob := &pb.TokenLogprobs{TokenId: 5}
	session := newSession(t, dial(t, &fakeRouter{session: answering(func(start *pb.SessionStart) *pb.SessionResponse {
		slot := start.GetSlot()
		return &pb.SessionResponse{
			Accepted:       []*pb.SessionAccepted{{Slot: slot, Accepted: accepted()}},
			Placed:         []*pb.SessionPlaced{{Slot: slot, Placement: &pb.ChoicePlacement{Choice: 1}}},
			PromptLogprobs: []*pb.SessionPromptLogprobs{{Slot: slot, PromptLogprobs: &pb.PromptLogprobs{TokenIds: []uint32{1}}}},
			Slots:          []uint32{slot, slot, slot},
			Choices:        []uint32{0, 1, 0},
			NumTokens:      []uint32{2, 1, 1},
			TokenOffsets:   []uint32{0, 0, 2},
			TokenIds:       []uint32{1, 2, 5, 3},
			Texts:          []string{"ab", "x", "c"},
			Logprobs:       []*pb.SessionLogprobs{{Slot: slot, Choice: 1, Tokens: []*pb.TokenLogprobs{logprob}}},
			Parsed:         []*pb.SessionParsed{{Slot: slot, Choice: 1, Reasoning: "hm"}},
			Finished:       []*pb.SessionFinished{{Slot: slot, Finished: finished(0)}, {Slot: slot, Finished: finished(1)}},
		}
	})}))
	numPlaced := 0
	completion, err := quartet.Collect(func(yield func(*quartet.Part, error) bool) {
		for part, err := range session.Generate(testContext(t), request) {
			if part.GetPlaced() != nil {
				numPlaced++
			}
			if !yield(part, err) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	first, second := completion.Choices[0], completion.Choices[1]
	if fmt.Sprint(first.Text, first.TokenIDs) != "abc[1 2 3]" || fmt.Sprint(second.Text, second.TokenIDs) != "x[5]" {
		t.Errorf("got %+v and %+v", first, second)
	}
	if second.Reasoning != "hm" || len(second.Logprobs) != 1 || len(first.Logprobs) != 0 {
		t.Errorf("got %+v and %+v", first, second)
	}
	if numPlaced != 1 || completion.PromptLogprobs == nil {
		t.Errorf("got %d placed and %v", numPlaced, completion.PromptLogprobs)
	}
}

func TestAFailureIsOfItsRequestAlone(t *testing.T) {
	session := newSession(t, dial(t, &fakeRouter{session: answering(func(start *pb.SessionStart) *pb.SessionResponse {
		if start.GetStart().GetText() == "good" {
			return answered(start.GetSlot(), "fine")
		}
		failure := &pb.Failure{
			Code: uint32(codes.InvalidArgument), Reason: "INVALID_REQUEST", Message: "no", Field: "text",
			RetryDelay: durationpb.New(time.Second),
		}
		return &pb.SessionResponse{Failures: []*pb.SessionFailure{{Slot: start.GetSlot(), Failure: failure}}}
	})}))
	ctx := testContext(t)
	_, err := session.Complete(ctx, quartet.Text("bad"))
	var failure *quartet.Error
	wanted := quartet.Error{
		Code: codes.InvalidArgument, Reason: "INVALID_REQUEST", Message: "no", Field: "text", RetryAfter: time.Second,
	}
	if !errors.As(err, &failure) || *failure != wanted {
		t.Errorf("got %v", err)
	}
	if completion, err := session.Complete(ctx, quartet.Text("good")); err != nil || completion.Text() != "fine" {
		t.Errorf("got %+v, %v", completion, err)
	}
}

func TestASlowReaderLosesItsRequestAndNoOther(t *testing.T) {
	cancelled := make(chan uint32, 1)
	slow := make(chan uint32, 1)
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return err
			}
			if cancel := request.GetCancel(); cancel != nil {
				cancelled <- cancel.GetSlot()
				continue
			}
			slot := request.GetStart().GetSlot()
			if request.GetStart().GetStart().GetText() == "quick" {
				if err := stream.Send(answered(slot, "done")); err != nil {
					return err
				}
				continue
			}
			slow <- slot
			if err := stream.Send(&pb.SessionResponse{
				Accepted: []*pb.SessionAccepted{{Slot: slot, Accepted: accepted()}},
			}); err != nil {
				return err
			}
			for offset := 0; offset < 1<<17; offset += 1 << 12 {
				if err := stream.Send(tokens(slot, offset, 1<<12)); err != nil {
					return err
				}
			}
		}
	}}))
	ctx := testContext(t)
	var last error
	for part, err := range session.Generate(ctx, quartet.Text("slow")) {
		last = err
		if part.GetAccepted() != nil {
			// While another request runs, more comes for this one than may wait.
			completion, err := session.Complete(ctx, quartet.Text("quick"))
			if err != nil || completion.Text() != "done" {
				t.Fatalf("got %+v, %v", completion, err)
			}
			if slot := await(t, cancelled); slot != await(t, slow) {
				t.Errorf("slot %d was cancelled", slot)
			}
		}
	}
	if reasonOf(last) != "STREAM_STALLED" {
		t.Errorf("got %v", last)
	}
}

func TestWhatWaitsForAReaderIsMergedAndWhole(t *testing.T) {
	const count = 20_000
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		request, err := stream.Recv()
		for offset := 0; offset < count && err == nil; offset++ {
			message := tokens(request.GetStart().GetSlot(), offset, 1)
			message.Texts = []string{"é"}
			err = stream.Send(message)
		}
		if err == nil {
			finish := &pb.SessionFinished{Slot: request.GetStart().GetSlot(), Finished: finished(0)}
			err = stream.Send(&pb.SessionResponse{Finished: []*pb.SessionFinished{finish}})
		}
		<-stream.Context().Done()
		return err
	}}))
	completion, err := session.Complete(testContext(t), quartet.Text("x"))
	if err != nil {
		t.Fatal(err)
	}
	if len(completion.Choices[0].TokenIDs) != count || len(completion.Text()) != 2*count {
		t.Errorf("got %d tokens and %d bytes", len(completion.Choices[0].TokenIDs), len(completion.Text()))
	}
}

func TestACancelledRequestKeepsItsSlotUntilTheRouterHasEndedIt(t *testing.T) {
	slots := make(chan uint32, 5)
	endIt, ended := make(chan struct{}), make(chan struct{})
	var whenEnded sync.Once
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return err
			}
			var response *pb.SessionResponse
			switch {
			case request.GetCancel() != nil:
				go func() {
					// The router takes its time. Nothing else is sent meanwhile: see below.
					<-endIt
					finish := &pb.ChoiceFinished{Reason: pb.FinishReason_FINISH_REASON_CANCELLED}
					_ = stream.Send(&pb.SessionResponse{Finished: []*pb.SessionFinished{
						{Slot: request.GetCancel().GetSlot(), Finished: finish},
					}})
					whenEnded.Do(func() { close(ended) })
				}()
				continue
			case request.GetStart().GetStart().GetText() == "endless":
				response = tokens(request.GetStart().GetSlot(), 0, 1)
			default:
				response = answered(request.GetStart().GetSlot(), "")
			}
			slots <- request.GetStart().GetSlot()
			if err := stream.Send(response); err != nil {
				return err
			}
		}
	}}))
	complete := func() {
		t.Helper()
		if _, err := session.Complete(testContext(t), quartet.Text("short")); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	var last error
	for _, err := range session.Generate(ctx, quartet.Text("endless")) {
		cancel()
		last = err
	}
	if !errors.Is(last, context.Canceled) {
		t.Errorf("got %v", last)
	}
	complete()
	close(endIt)
	await(t, ended)
	complete() // Its answer comes after the end of the first.
	for range session.Generate(testContext(t), quartet.Text("endless")) {
		complete()
		break
	}
	first, second, _, fourth, fifth := <-slots, <-slots, <-slots, <-slots, <-slots
	if first != 0 || second != 1 || fourth+fifth != 1 {
		t.Errorf("slots %d, %d, %d, %d", first, second, fourth, fifth)
	}
}

func TestASessionThatIsOldIsOpenedAgainForARequest(t *testing.T) {
	idle, err := status.New(codes.Unavailable, "idle").WithDetails(&errdetails.ErrorInfo{Reason: "SESSION_IDLE"})
	if err != nil {
		t.Fatal(err)
	}
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		request, err := stream.Recv()
		if err == nil {
			err = stream.Send(answered(request.GetStart().GetSlot(), "first of a stream"))
		}
		if err != nil {
			return err
		}
		// The next start finds the stream ending.
		if _, err := stream.Recv(); err != nil {
			return err
		}
		return idle.Err()
	}}))
	for range 3 {
		completion, err := session.Complete(testContext(t), quartet.Text("x"))
		if err != nil || completion.Text() != "first of a stream" {
			t.Fatalf("got %+v, %v", completion, err)
		}
	}
}

func failed(slot uint32, reason string) *pb.SessionResponse {
	failure := &pb.Failure{Code: uint32(codes.Unavailable), Reason: reason, Message: reason}
	return &pb.SessionResponse{Failures: []*pb.SessionFailure{{Slot: slot, Failure: failure}}}
}

func TestWhatARouterThatGoesAwayDoesNotBeginIsSentOnAnotherStream(t *testing.T) {
	numStreams := make(chan struct{}, 2)
	goOn := make(chan struct{})
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		numStreams <- struct{}{}
		if len(numStreams) > 1 { // the next router
			return answering(func(start *pb.SessionStart) *pb.SessionResponse {
				return answered(start.GetSlot(), "next")
			})(stream)
		}
		first, err := stream.Recv()
		if err == nil {
			err = stream.Send(tokens(first.GetStart().GetSlot(), 0, 1))
		}
		if err != nil {
			return err
		}
		second, err := stream.Recv()
		if err == nil {
			err = stream.Send(failed(second.GetStart().GetSlot(), "DRAINING"))
		}
		if err != nil {
			return err
		}
		<-goOn
		finish := &pb.SessionFinished{Slot: first.GetStart().GetSlot(), Finished: finished(0)}
		return stream.Send(&pb.SessionResponse{Finished: []*pb.SessionFinished{finish}})
	}}))
	numParts := 0
	for _, err := range session.Generate(testContext(t), quartet.Text("begun")) {
		if err != nil {
			t.Fatal(err)
		}
		if numParts++; numParts > 1 {
			continue
		}
		for range 2 {
			completion, err := session.Complete(testContext(t), quartet.Text("x"))
			if err != nil || completion.Text() != "next" {
				t.Fatalf("got %+v, %v", completion, err)
			}
		}
		close(goOn) // What had begun is answered to its end.
	}
	if numParts != 2 || len(numStreams) != 2 {
		t.Errorf("got %d parts on %d streams", numParts, len(numStreams))
	}
}

func TestWhatNoRouterBeginsIsSentTwiceAndNoMore(t *testing.T) {
	for _, reason := range []string{"DRAINING", "QUEUE_FULL"} {
		starts := make(chan string, 10)
		session := newSession(t, dial(t, &fakeRouter{session: answering(func(start *pb.SessionStart) *pb.SessionResponse {
			starts <- start.GetStart().GetText()
			return failed(start.GetSlot(), reason)
		})}))
		_, err := session.Complete(testContext(t), quartet.Text("x"))
		wanted := map[string]int{"DRAINING": 2, "QUEUE_FULL": 1}[reason]
		if reasonOf(err) != reason || len(starts) != wanted {
			t.Errorf("got %v after %d starts", err, len(starts))
		}
	}
}

func TestClosingASessionEndsStreamsOfRoutersThatGoAway(t *testing.T) {
	begun := make(chan struct{}, 1)
	session := dial(t, &fakeRouter{session: answering(func(start *pb.SessionStart) *pb.SessionResponse {
		if start.GetStart().GetText() == "endless" {
			begun <- struct{}{}
			return nil
		}
		return failed(start.GetSlot(), "DRAINING")
	})}).Session()
	ended := make(chan error, 1)
	go func() {
		_, err := session.Complete(testContext(t), quartet.Text("endless"))
		ended <- err
	}()
	await(t, begun)
	if _, err := session.Complete(testContext(t), quartet.Text("x")); reasonOf(err) != "DRAINING" {
		t.Errorf("got %v", err)
	}
	closed := make(chan struct{})
	go func() {
		session.Close()
		close(closed)
	}()
	await(t, closed)
	if err := await(t, ended); reasonOf(err) != "CANCELLED" {
		t.Errorf("got %v", err)
	}
}

func TestAStreamThatBreaksFailsWhatHadBegun(t *testing.T) {
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := stream.Send(tokens(request.GetStart().GetSlot(), 0, 1)); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "gone")
	}}))
	for range 2 {
		numParts := 0
		var last error
		for part, err := range session.Generate(testContext(t), quartet.Text("x")) {
			if part != nil {
				numParts++
			}
			last = err
		}
		if reasonOf(last) != "ROUTER_UNAVAILABLE" || numParts != 1 {
			t.Errorf("got %d parts and %v", numParts, last)
		}
	}
}

func TestAMessageThatBreaksTheContractEndsTheStream(t *testing.T) {
	for name, broken := range map[string]*pb.SessionResponse{
		"columns":      {Slots: []uint32{0}},
		"unknown slot": tokens(9, 0, 1),
		"sum":          {Slots: []uint32{0}, NumTokens: []uint32{2}, TokenOffsets: []uint32{0}, TokenIds: []uint32{1}},
		"left over":    {TokenIds: []uint32{1}},
	} {
		session := newSession(t, dial(t, &fakeRouter{session: answering(func(*pb.SessionStart) *pb.SessionResponse {
			return broken
		})}))
		if _, err := session.Complete(testContext(t), quartet.Text("x")); reasonOf(err) != "PROTOCOL_VIOLATION" {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestClosingASessionEndsItsRequests(t *testing.T) {
	began := make(chan struct{}, 1)
	session := dial(t, &fakeRouter{session: answering(func(*pb.SessionStart) *pb.SessionResponse {
		began <- struct{}{}
		return nil
	})}).Session()
	failed := make(chan error, 1)
	go func() {
		_, err := session.Complete(testContext(t), quartet.Text("x"))
		failed <- err
	}()
	await(t, began)
	session.Close()
	if err := await(t, failed); reasonOf(err) != "CANCELLED" {
		t.Errorf("got %v", err)
	}
	if _, err := session.Complete(testContext(t), quartet.Text("x")); reasonOf(err) != "CANCELLED" {
		t.Errorf("got %v", err)
	}
}
