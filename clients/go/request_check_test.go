package quartet_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	quartet "quartet/clients/go"
	pb "quartet/codegen/gen/go/quartet/v1"
)

// badRequests are requests that no router could take, by the field at fault.
func badRequests() map[string]*quartet.Request {
	stop := quartet.Text("x")
	stop.TextOptions = &pb.TextOptions{StopStrings: []string{"fine", "\xff"}}
	return map[string]*quartet.Request{
		"start":                        nil,
		"text":                         quartet.Text("a\xff"),
		"chat.messages[1].content":     quartet.Chat(quartet.System("x"), quartet.User("a\xff")),
		"text_options.stop_strings[1]": stop,
		"chat":                         quartet.Chat(quartet.User("x", make([]byte, 70<<20))),
	}
}

func TestARequestThatCantBeSentFailsAloneAndNamesItsField(t *testing.T) {
	const numOthers = 8
	begun, goOn := make(chan struct{}, numOthers), make(chan struct{})
	router := &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		slots := []uint32{}
		for len(slots) < numOthers {
			request, err := stream.Recv()
			if err != nil {
				return err
			}
			slots = append(slots, request.GetStart().GetSlot())
			begun <- struct{}{}
		}
		<-goOn
		for _, slot := range slots {
			if err := stream.Send(answered(slot, "fine")); err != nil {
				return err
			}
		}
		<-stream.Context().Done()
		return nil
	}}
	client := dial(t, router)
	session := newSession(t, client)
	ctx := testContext(t)
	var asking sync.WaitGroup
	for range numOthers {
		asking.Go(func() {
			if completion, err := session.Complete(ctx, quartet.Text("good")); err != nil || completion.Text() != "fine" {
				t.Errorf("got %+v, %v", completion, err)
			}
		})
	}
	for range numOthers {
		await(t, begun)
	}
	for field, request := range badRequests() {
		for name, complete := range map[string]func(context.Context, *quartet.Request) (*quartet.Completion, error){
			"generate": client.Complete, "session": session.Complete,
		} {
			_, err := complete(ctx, request)
			var failure *quartet.Error
			if !errors.As(err, &failure) || failure.Code != codes.InvalidArgument || failure.Field != field || failure.Reason == "" {
				t.Errorf("%s of %s: got %v", name, field, err)
			}
		}
	}
	if _, err := session.Complete(quartet.WithTraceparent(ctx, "a\xff"), quartet.Text("x")); reasonOf(err) != "INVALID_FIELD" {
		t.Errorf("traceparent: got %v", err)
	}
	close(goOn)
	asking.Wait()
}

// waitedFor is a context that tells when someone waits for its end.
type waitedFor struct {
	context.Context
	waits chan<- struct{}
}

func (w waitedFor) Done() <-chan struct{} {
	select {
	case w.waits <- struct{}{}:
	default:
	}
	return w.Context.Done()
}

func TestARequestMayBeChangedOnceItsLoopIsLeft(t *testing.T) {
	const numFillers = 2
	read, texts := make(chan struct{}), make(chan string, numFillers+1)
	session := newSession(t, dial(t, &fakeRouter{session: func(stream pb.RouterService_SessionServer) error {
		<-read
		return answering(func(start *pb.SessionStart) *pb.SessionResponse {
			texts <- start.GetStart().GetText()
			return nil
		})(stream)
	}}))
	// It returns once the request waits to be sent, and stop once its loop is left.
	begin := func(request *quartet.Request) (stop func()) {
		ctx, cancel := context.WithCancel(testContext(t))
		waits, left := make(chan struct{}, 1), make(chan struct{})
		go func() {
			defer close(left)
			_, _ = session.Complete(waitedFor{ctx, waits}, request)
		}()
		await(t, waits)
		return func() {
			cancel()
			await(t, left)
		}
	}
	// The first is on its way, and there is no room for the second, which is why the last one waits.
	for range numFillers {
		defer begin(quartet.Text(strings.Repeat("x", 1<<20)))()
	}
	request := quartet.Text("as it was")
	stop := begin(request)
	stop()
	request.Prompt = &pb.GenerateStart_Text{Text: "changed"}
	close(read)
	for range numFillers {
		await(t, texts)
	}
	if got := await(t, texts); got != "as it was" {
		t.Errorf("the router got %q", got)
	}
}
