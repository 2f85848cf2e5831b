package quartet_test

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	quartet "quartet/clients/go"
	pb "quartet/codegen/gen/go/quartet/v1"
)

const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// parts is a fake's answer that sends these.
func parts(parts ...*quartet.Part) func(pb.RouterService_GenerateServer) error {
	return func(stream pb.RouterService_GenerateServer) error {
		for _, part := range parts {
			if err := stream.Send(part); err != nil {
				return err
			}
		}
		return nil
	}
}

func acceptedPart() *quartet.Part {
	return &quartet.Part{Message: &pb.GenerateResponse_Accepted{Accepted: accepted()}}
}

func deltaPart(delta *pb.Delta) *quartet.Part {
	return &quartet.Part{Message: &pb.GenerateResponse_Delta{Delta: delta}}
}

func finishedPart(choice uint32) *quartet.Part {
	return &quartet.Part{Message: &pb.GenerateResponse_Finished{Finished: finished(choice)}}
}

func TestAnErrorOfTheRouterHasItsReasonItsFieldAndItsRetryTime(t *testing.T) {
	refused, err := status.New(codes.ResourceExhausted, "the queue is full").WithDetails(
		&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Domain: "quartet"},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "priority"}}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
	)
	if err != nil {
		t.Fatal(err)
	}
	client := dial(t, &fakeRouter{generate: func(pb.RouterService_GenerateServer) error { return refused.Err() }})
	_, err = client.Complete(testContext(t), quartet.Text("x"))
	var failure *quartet.Error
	if !errors.As(err, &failure) {
		t.Fatalf("%v is no *Error", err)
	}
	wanted := quartet.Error{
		Code: codes.ResourceExhausted, Reason: "QUEUE_FULL", Message: "the queue is full", Field: "priority",
		RetryAfter: 1500 * time.Millisecond,
	}
	if *failure != wanted {
		t.Errorf("got %+v", *failure)
	}
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("its code is %v to gRPC", status.Code(err))
	}
	line := "quartet: ResourceExhausted QUEUE_FULL: the queue is full (priority); try again after 1.5s"
	if err.Error() != line {
		t.Errorf("it reads %q", err)
	}
}

func TestWhereNoRouterAnswersTheErrorSaysSo(t *testing.T) {
	client, err := quartet.Dial("127.0.0.1:1", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	session := newSession(t, client)
	for name, complete := range map[string]func(context.Context, *quartet.Request) (*quartet.Completion, error){
		"generate": client.Complete, "session": session.Complete,
	} {
		_, err = complete(testContext(t), quartet.Text("x"))
		var failure *quartet.Error
		if !errors.As(err, &failure) || failure.Reason != "ROUTER_UNAVAILABLE" || failure.Code != codes.Unavailable {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestChoicesReasoningAndCompleteToolCallsAreCollected(t *testing.T) {
	call := func(index uint32, id, name, arguments string, isComplete bool) *pb.ToolCallDelta {
		return &pb.ToolCallDelta{Index: index, Id: id, Name: name, Arguments: arguments, IsComplete: isComplete}
	}
	client := dial(t, &fakeRouter{generate: parts(
		acceptedPart(),
		deltaPart(&pb.Delta{Choice: 1, TokenIds: []uint32{4}, Text: "b"}),
		deltaPart(&pb.Delta{TokenIds: []uint32{1, 2}, Text: "a", Reasoning: "hm"}),
		deltaPart(&pb.Delta{ToolCalls: []*pb.ToolCallDelta{call(0, "x", "add", `{"a":`, false), call(1, "y", "cut", "{", false)}}),
		deltaPart(&pb.Delta{TokenOffset: 2, TokenIds: []uint32{3}, ToolCalls: []*pb.ToolCallDelta{call(0, "", "", `1}`, true)}}),
		finishedPart(1),
		finishedPart(0),
	)})
	request := quartet.Text("x")
	numChoices := uint32(2)
	request.NumChoices = &numChoices
	completion, err := client.Complete(testContext(t), request)
	if err != nil {
		t.Fatal(err)
	}
	if completion.Accepted.GetSeed() != 7 || len(completion.Choices) != 2 {
		t.Fatalf("got %+v", completion)
	}
	first, second := completion.Choices[0], completion.Choices[1]
	if completion.Text() != "a" || first.Reasoning != "hm" || !slices.Equal(first.TokenIDs, []uint32{1, 2, 3}) {
		t.Errorf("got %+v", first)
	}
	if len(first.ToolCalls) != 1 || first.ToolCalls[0].GetArguments() != `{"a":1}` || first.ToolCalls[0].GetId() != "x" {
		t.Errorf("got %v", first.ToolCalls)
	}
	if second.Text != "b" || second.Finished.GetChoice() != 1 {
		t.Errorf("got %+v", second)
	}
}

func TestAnAnswerWithoutItsEndOrWithAGapIsAnError(t *testing.T) {
	for name, answer := range map[string][]*quartet.Part{
		"1 choices unfinished":   {acceptedPart(), deltaPart(&pb.Delta{TokenIds: []uint32{1}})},
		"tokens before number 2": {acceptedPart(), deltaPart(&pb.Delta{TokenOffset: 2, TokenIds: []uint32{1}}), finishedPart(0)},
	} {
		client := dial(t, &fakeRouter{generate: parts(answer...)})
		_, err := client.Complete(testContext(t), quartet.Text("x"))
		var failure *quartet.Error
		if !errors.As(err, &failure) || failure.Reason != "PROTOCOL_VIOLATION" || !strings.Contains(failure.Message, name) {
			t.Errorf("got %v, not %q", err, name)
		}
	}
}

func TestLeavingTheLoopOrEndingTheContextCancelsTheRequest(t *testing.T) {
	ended := make(chan error, 2)
	client := dial(t, &fakeRouter{generate: func(stream pb.RouterService_GenerateServer) error {
		err := stream.Send(acceptedPart())
		<-stream.Context().Done()
		ended <- err
		return stream.Context().Err()
	}})
	for part, err := range client.Generate(testContext(t), quartet.Text("x")) {
		if err != nil || part.GetAccepted() == nil {
			t.Fatal(part, err)
		}
		break
	}
	await(t, ended)

	reason := errors.New("not wanted any more")
	ctx, cancel := context.WithCancelCause(testContext(t))
	defer cancel(nil)
	var last error
	for _, err := range client.Generate(ctx, quartet.Text("x")) {
		cancel(reason)
		last = err
	}
	if !errors.Is(last, reason) {
		t.Errorf("got %v", last)
	}
	await(t, ended)
}

func TestTheRouterLearnsThatNothingFollowsTheRequest(t *testing.T) {
	client := dial(t, &fakeRouter{generate: func(stream pb.RouterService_GenerateServer) error {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
			return err
		}
		return parts(acceptedPart(), finishedPart(0))(stream)
	}})
	if _, err := client.Complete(testContext(t), quartet.Text("x")); err != nil {
		t.Error(err)
	}
}

func TestLongMessagesAreTaken(t *testing.T) {
	text := strings.Repeat("x", 5<<20) // More than gRPC takes by default.
	client := dial(t, &fakeRouter{generate: parts(acceptedPart(), deltaPart(&pb.Delta{Text: text}), finishedPart(0))})
	completion, err := client.Complete(testContext(t), quartet.Text("x"))
	if err != nil || completion.Text() != text {
		t.Error(err)
	}
}

func TestARouterWhoseHostIsGoneIsNoticed(t *testing.T) {
	t.Parallel() // It waits for a ping and its answer, 15 s.
	server := grpc.NewServer()
	pb.RegisterRouterServiceServer(server, &fakeRouter{generate: func(stream pb.RouterService_GenerateServer) error {
		err := stream.Send(acceptedPart())
		<-stream.Context().Done()
		return err
	}})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mute := &muteListener{Listener: listener}
	served := make(chan error, 1)
	go func() { served <- server.Serve(mute) }()
	defer func() {
		server.Stop()
		if err := await(t, served); err != nil {
			t.Error(err)
		}
	}()
	client, err := quartet.Dial(listener.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var last error
	for _, err := range client.Generate(testContext(t), quartet.Text("x")) {
		mute.isMute.Store(true)
		last = err
	}
	if reasonOf(last) != "ROUTER_UNAVAILABLE" {
		t.Errorf("got %v", last)
	}
}

// muteListener is a server's, whose connections stay open, but answer nothing once it is mute.
type muteListener struct {
	net.Listener
	isMute atomic.Bool
}

func (l *muteListener) Accept() (net.Conn, error) {
	connection, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &muteConn{Conn: connection, isMute: &l.isMute}, nil
}

type muteConn struct {
	net.Conn
	isMute *atomic.Bool
}

func (c *muteConn) Write(data []byte) (int, error) {
	if c.isMute.Load() {
		return len(data), nil
	}
	return c.Conn.Write(data)
}

func TestTheTraceparentOfTheContextIsSentOnBothPaths(t *testing.T) {
	found := make(chan string, 2)
	client := dial(t, &fakeRouter{
		generate: func(stream pb.RouterService_GenerateServer) error {
			incoming, _ := metadata.FromIncomingContext(stream.Context())
			found <- strings.Join(incoming.Get("traceparent"), " ")
			return parts(acceptedPart(), finishedPart(0))(stream)
		},
		session: answering(func(start *pb.SessionStart) *pb.SessionResponse {
			found <- start.GetTraceparent()
			return answered(start.GetSlot(), "")
		}),
	})
	ctx := quartet.WithTraceparent(testContext(t), traceparent)
	session := newSession(t, client)
	for _, complete := range []func(context.Context, *quartet.Request) (*quartet.Completion, error){
		client.Complete, session.Complete,
	} {
		if _, err := complete(ctx, quartet.Text("x")); err != nil {
			t.Fatal(err)
		}
		if got := await(t, found); got != traceparent {
			t.Errorf("the router got %q", got)
		}
	}
}

func TestAMessageAboutPicturesHasThemBeforeTheText(t *testing.T) {
	message := quartet.User("What is this?", []byte("one"), []byte("two"))
	contents := []string{}
	for _, part := range message.GetParts() {
		contents = append(contents, string(part.GetMedia().GetData())+part.GetText())
	}
	if message.GetContent() != "" || !slices.Equal(contents, []string{"one", "two", "What is this?"}) {
		t.Errorf("got %v", message)
	}
}

func TestFilesThatHoldNoCertificateAreNamed(t *testing.T) {
	for file, wanted := range map[string]string{"/nowhere": "/nowhere", "client_test.go": "client_test.go holds no certificate"} {
		if _, err := quartet.LoadTLS(file, "", ""); err == nil || !strings.Contains(err.Error(), wanted) {
			t.Errorf("got %v", err)
		}
	}
}

// await is what comes from the channel, or the end of the test.
func await[T any](t *testing.T, channel <-chan T) T {
	t.Helper()
	select {
	case value := <-channel:
		return value
	case <-time.After(timeout):
		t.Fatal("nothing came in time")
		panic("unreachable")
	}
}
