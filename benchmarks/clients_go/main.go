// clients_go is the Go client's part of benchmarks.clients: it reads answers on one session and says how many tokens it
// had. It gets its job as JSON, answers once all requests are accepted, and then each order with its count.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	quartet "quartet/clients/go"
)

// endless is so many tokens that no answer ends while it is measured.
const endless = 500_000

type job struct {
	Address    string `json:"address"`
	NumStreams int    `json:"num_streams"`
}

type count struct {
	NumTokens int64  `json:"num_tokens"`
	Error     string `json:"error"`
}

// reader reads endless answers.
type reader struct {
	numTokens atomic.Int64 // Of all of them so far.
	failure   atomic.Value // Why a request ended, a string; nothing: none has.
	accepted  sync.WaitGroup
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run reads until standard input ends.
func run() error {
	var job job
	if err := json.Unmarshal([]byte(os.Args[1]), &job); err != nil {
		return err
	}
	client, err := quartet.Dial(job.Address, nil)
	if err != nil {
		return err
	}
	defer client.Close()
	session := client.Session()
	defer session.Close()
	reader := &reader{}
	reader.accepted.Add(job.NumStreams)
	for seed := range job.NumStreams {
		go reader.read(session, uint64(seed))
	}
	reader.accepted.Wait()
	answers := json.NewEncoder(os.Stdout)
	if err := answers.Encode(reader.count()); err != nil {
		return err
	}
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		if err := answers.Encode(reader.count()); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) read(session *quartet.Session, seed uint64) {
	begin := sync.OnceFunc(r.accepted.Done)
	defer begin()
	request := quartet.Text("Once upon a time")
	request.Seed = &seed
	request.Sampling = &quartet.Sampling{MaxTokens: proto.Uint32(endless), IgnoreEos: proto.Bool(true)}
	for part, err := range session.Generate(context.Background(), request) {
		if err != nil {
			r.failure.Store(err.Error())
			return
		}
		if part.GetAccepted() != nil {
			begin()
		}
		r.numTokens.Add(int64(len(part.GetDelta().GetTokenIds())))
	}
	r.failure.Store("an answer ended")
}

func (r *reader) count() count {
	failure, _ := r.failure.Load().(string)
	return count{NumTokens: r.numTokens.Load(), Error: failure}
}
