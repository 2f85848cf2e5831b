package quartet_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	quartet "quartet/clients/go"
	pb "quartet/codegen/gen/go/quartet/v1"
)

// live is a running fleet, and what the Python client got of it.
type live struct {
	Address string `json:"address"`
	CA      string `json:"ca"`
	Cert    string `json:"cert"`
	Key     string `json:"key"`
	// The certificate of who may list workers, and its key.
	OperatorCert string `json:"operator_cert"`
	OperatorKey  string `json:"operator_key"`
	// Token ids of greedy answers, by prompt; all of the same length.
	Answers map[string][]uint32 `json:"answers"`
	// A file, what to ask about it in a chat, and the greedy answer's token ids.
	Picture     string   `json:"picture"`
	Question    string   `json:"question"`
	PictureIDs  []uint32 `json:"picture_ids"`
	PictureText string   `json:"picture_text"`
	// Of another router, which waits for so long for who reads nothing, in seconds.
	StallingAddress string  `json:"stalling_address"`
	StallTimeout    float64 `json:"stall_timeout_s"`
}

// dialLive connects to the fleet that the file in QUARTET_GO_LIVE names (see tests/e2e/test_go_client.py), by TLS.
func dialLive(t *testing.T) (*quartet.Client, *live) {
	t.Helper()
	path := os.Getenv("QUARTET_GO_LIVE")
	if path == "" {
		t.Skip("QUARTET_GO_LIVE names no running fleet")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	fleet := &live{}
	if err := json.Unmarshal(text, fleet); err != nil {
		t.Fatal(err)
	}
	return dialAs(t, fleet, fleet.Address, fleet.Cert, fleet.Key), fleet
}

func dialAs(t *testing.T, fleet *live, address, cert, key string) *quartet.Client {
	t.Helper()
	config, err := quartet.LoadTLS(fleet.CA, cert, key)
	if err != nil {
		t.Fatal(err)
	}
	client, err := quartet.Dial(address, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// awaitRunning waits until so many requests run at decode workers, by their reports. One that Prefill has just ended may
// still be in its last report.
func awaitRunning(t *testing.T, operator *quartet.Client, wanted uint32) {
	t.Helper()
	ctx := testContext(t)
	watch, err := operator.Stub().WatchWorkers(ctx, &pb.WatchWorkersRequest{WantsTotals: true})
	if err != nil {
		t.Fatal(quartet.ToError(err))
	}
	running := map[string]uint32{}
	for {
		message, err := watch.Recv()
		if err != nil {
			t.Fatalf("%v run, not %d: %v", running, wanted, quartet.ToError(err))
		}
		total := uint32(0)
		for _, worker := range message.GetUpdated() {
			if worker.GetRecord().GetRole() != pb.WorkerRole_WORKER_ROLE_DECODE {
				continue
			}
			running[worker.GetRecord().GetWorkerId()] = 0
			for _, rank := range worker.GetLoad().GetRanks() {
				running[worker.GetRecord().GetWorkerId()] += rank.GetNumRunning()
			}
		}
		for _, count := range running {
			total += count
		}
		if total == wanted {
			return
		}
	}
}

// greedy is a request for as many tokens as the known answers have.
func greedy(prompt string, numTokens int) *quartet.Request {
	request := quartet.Text(prompt)
	request.Sampling = quartet.Greedy(uint32(numTokens))
	request.Sampling.IgnoreEos = proto.Bool(true)
	return request
}

// endless is a request that no test waits for; the model takes no more than 4,608 tokens.
func endless() *quartet.Request { return greedy("Once upon a time", 4400) }

func TestLiveGenerateGivesTheTokensOfThePythonClient(t *testing.T) {
	client, fleet := dialLive(t)
	for prompt, ids := range fleet.Answers {
		completion, err := client.Complete(testContext(t), greedy(prompt, len(ids)))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(completion.Choices[0].TokenIDs, ids) {
			t.Errorf("%q: got %v, not %v", prompt, completion.Choices[0].TokenIDs, ids)
		}
		if reason := completion.Choices[0].Finished.GetReason(); reason != pb.FinishReason_FINISH_REASON_LENGTH {
			t.Errorf("%q ended with %v", prompt, reason)
		}
	}
}

func TestLiveSessionGivesThemForManyRequestsAtOnce(t *testing.T) {
	client, fleet := dialLive(t)
	session := newSession(t, client)
	ctx := testContext(t)
	var asking sync.WaitGroup
	for range 3 {
		for prompt, ids := range fleet.Answers {
			asking.Go(func() {
				completion, err := session.Complete(ctx, greedy(prompt, len(ids)))
				if err != nil {
					t.Error(err)
				} else if !slices.Equal(completion.Choices[0].TokenIDs, ids) {
					t.Errorf("%q: got %v, not %v", prompt, completion.Choices[0].TokenIDs, ids)
				}
			})
		}
	}
	asking.Wait()
}

func TestLiveChatAboutAPictureIsAnsweredOnBothPaths(t *testing.T) {
	client, fleet := dialLive(t)
	session := newSession(t, client)
	picture, err := os.ReadFile(fleet.Picture)
	if err != nil {
		t.Fatal(err)
	}
	for name, complete := range map[string]func(context.Context, *quartet.Request) (*quartet.Completion, error){
		"generate": client.Complete, "session": session.Complete,
	} {
		request := quartet.Chat(quartet.User(fleet.Question, picture))
		request.Sampling = quartet.Greedy(uint32(len(fleet.PictureIDs)))
		completion, err := complete(testContext(t), request)
		if err != nil {
			t.Fatal(err)
		}
		if completion.Text() != fleet.PictureText || !slices.Equal(completion.Choices[0].TokenIDs, fleet.PictureIDs) {
			t.Errorf("%s: got %q", name, completion.Text())
		}
		if completion.Choices[0].Finished.GetUsage().GetNumMediaTokens() == 0 {
			t.Errorf("%s: no token is of the picture", name)
		}
	}
}

func TestLiveCancelFreesTheWorkerOnBothPaths(t *testing.T) {
	client, fleet := dialLive(t)
	operator := dialAs(t, fleet, fleet.Address, fleet.OperatorCert, fleet.OperatorKey)
	session := newSession(t, client)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	var asking sync.WaitGroup
	var begun sync.WaitGroup
	begun.Add(2)
	for name, parts := range map[string]func(func(*quartet.Part, error) bool){
		"generate": client.Generate(ctx, endless()), "session": session.Generate(ctx, endless()),
	} {
		asking.Go(func() {
			begin := sync.OnceFunc(begun.Done)
			defer begin()
			var last error
			for part, err := range parts {
				if part.GetDelta() != nil {
					begin()
				}
				last = err
			}
			if !errors.Is(last, context.Canceled) {
				t.Errorf("%s ended with %v", name, last)
			}
		})
	}
	begun.Wait()
	awaitRunning(t, operator, 2)
	cancel()
	asking.Wait()
	awaitRunning(t, operator, 0) // While the connection and the session are still open.
	for prompt, ids := range fleet.Answers {
		completion, err := session.Complete(testContext(t), greedy(prompt, len(ids)))
		if err != nil || !slices.Equal(completion.Choices[0].TokenIDs, ids) {
			t.Errorf("%q: got %+v, %v", prompt, completion, err)
		}
	}
}

func TestLiveSlowReaderOfGenerateIsWaitedForSoLong(t *testing.T) {
	_, fleet := dialLive(t)
	client := dialAs(t, fleet, fleet.StallingAddress, fleet.Cert, fleet.Key)
	operator := dialAs(t, fleet, fleet.Address, fleet.OperatorCert, fleet.OperatorKey)
	awaitRunning(t, operator, 0) // It is connected then, and sees what runs for seconds only.
	request := endless()
	request.Output = &pb.OutputOptions{Logprobs: proto.Uint32(20)} // So a few hundred tokens are all that is sent unread.
	var waited time.Duration
	var last error
	for part, err := range client.Generate(testContext(t), request) {
		if part.GetDelta() != nil && waited == 0 {
			awaitRunning(t, operator, 1)
			begin := time.Now()
			awaitRunning(t, operator, 0)
			waited = time.Since(begin)
		}
		last = err
	}
	if reasonOf(last) != "STREAM_STALLED" || waited.Seconds() < fleet.StallTimeout/2 {
		t.Errorf("got %v after %v", last, waited)
	}
}

func TestLiveRefusalsNameTheField(t *testing.T) {
	client, _ := dialLive(t)
	session := newSession(t, client)
	for name, complete := range map[string]func(context.Context, *quartet.Request) (*quartet.Completion, error){
		"generate": client.Complete, "session": session.Complete,
	} {
		request := greedy("x", 1)
		request.Sampling.TopP = proto.Float32(2)
		_, err := complete(testContext(t), request)
		var failure *quartet.Error
		if !errors.As(err, &failure) || failure.Field != "sampling.top_p" || failure.Reason == "" {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestLiveRouterOfAnotherAuthorityIsNotTrusted(t *testing.T) {
	_, fleet := dialLive(t)
	config, err := quartet.LoadTLS(fleet.CA, fleet.Cert, fleet.Key)
	if err != nil {
		t.Fatal(err)
	}
	config.RootCAs = nil // Those of the machine, which do not know the fleet's.
	client, err := quartet.Dial(fleet.Address, config)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Complete(testContext(t), greedy("x", 1)); reasonOf(err) != "ROUTER_UNAVAILABLE" {
		t.Errorf("got %v", err)
	}
}
