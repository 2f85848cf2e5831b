package quartet_test

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"

	quartet "quartet/clients/go"
	pb "quartet/codegen/gen/go/quartet/v1"
)

// A wait that only ends if something is broken.
const timeout = 60 * time.Second

// fakeRouter answers as a test says.
type fakeRouter struct {
	pb.UnimplementedRouterServiceServer
	generate func(stream pb.RouterService_GenerateServer) error
	session  func(stream pb.RouterService_SessionServer) error
}

func (f *fakeRouter) Generate(stream pb.RouterService_GenerateServer) error {
	return f.generate(stream)
}

func (f *fakeRouter) Session(stream pb.RouterService_SessionServer) error { return f.session(stream) }

// dial serves router for the time of the test, and makes a client of it.
func dial(t *testing.T, router *fakeRouter) *quartet.Client {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterRouterServiceServer(server, router)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	client, err := quartet.Dial(listener.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func newSession(t *testing.T, client *quartet.Client) *quartet.Session {
	t.Helper()
	session := client.Session()
	t.Cleanup(session.Close)
	return session
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	return ctx
}

// The parts of a plain answer.

func accepted() *pb.Accepted {
	return &pb.Accepted{RequestId: "0123456789abcdef0123456789abcdef", Seed: 7}
}

func finished(choice uint32) *pb.ChoiceFinished {
	return &pb.ChoiceFinished{Choice: choice, Reason: pb.FinishReason_FINISH_REASON_LENGTH}
}

// answered is a whole answer of one token in a message of a session.
func answered(slot uint32, text string) *pb.SessionResponse {
	return &pb.SessionResponse{
		Accepted:     []*pb.SessionAccepted{{Slot: slot, Accepted: accepted()}},
		Slots:        []uint32{slot},
		NumTokens:    []uint32{1},
		TokenOffsets: []uint32{0},
		TokenIds:     []uint32{11},
		Texts:        []string{text},
		Finished:     []*pb.SessionFinished{{Slot: slot, Finished: finished(0)}},
	}
}

// tokens is more of an answer in a message of a session.
func tokens(slot uint32, offset, count int) *pb.SessionResponse {
	return &pb.SessionResponse{
		Slots:        []uint32{slot},
		NumTokens:    []uint32{uint32(count)},
		TokenOffsets: []uint32{uint32(offset)},
		TokenIds:     make([]uint32, count),
	}
}
