package quartet

import (
	"context"
	"errors"
	"io"
	"iter"
	"slices"
	"sync"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	pb "quartet/codegen/gen/go/quartet/v1"
)

// maxUnread is how many tokens and characters of one request may wait for its reader. One stream carries many requests,
// so it is read whatever their readers do.
const maxUnread = 1 << 16

// maxMergedBytes is the text to which deltas are merged that wait.
const maxMergedBytes = 1 << 10

// Session sends many requests on one stream, which costs router and client less for each token than a stream a request.
// All methods may be called from any number of goroutines.
//
// The stream opens at the first request, and again at the next one after a break or after ten minutes without any. When
// it breaks, requests fail that had begun to be answered; others are sent again, once, and so are those that a router
// does not begin because it goes away.
type Session struct {
	stub pb.RouterServiceClient

	mutex    sync.Mutex
	stream   *sessionStream          // The last one that was opened, if any.
	open     map[*sessionStream]bool // It, and those before it whose requests still run.
	isClosed bool
	running  sync.WaitGroup
}

// Session makes a session with the router.
func (c *Client) Session() *Session {
	return &Session{stub: c.stub, open: map[*sessionStream]bool{}}
}

// Close ends all requests, and waits until nothing of the session runs any more.
func (s *Session) Close() {
	s.mutex.Lock()
	s.isClosed = true
	for stream := range s.open {
		stream.end(closedError())
	}
	s.mutex.Unlock()
	s.running.Wait()
}

// Generate is Client.Generate on the session's stream, with the same parts and errors. Its traceparent is that of ctx,
// too; other metadata is not sent.
//
// A reader may be slow: what comes meanwhile is merged and kept. Once 65,536 tokens and characters wait, the request
// fails with STREAM_STALLED; other requests don't notice.
func (s *Session) Generate(ctx context.Context, request *Request) iter.Seq2[*Part, error] {
	return func(yield func(*Part, error) bool) {
		own, err := ownRequest(request)
		if err != nil {
			yield(nil, err)
			return
		}
		call, err := s.start(ctx, own)
		if err != nil {
			yield(nil, err)
			return
		}
		defer func() { call.drop() }()
		for canRetry := true; ; {
			parts, err := call.next(ctx)
			if canRetry && isLost(err) {
				canRetry = false
				if again, startErr := s.start(ctx, own); startErr == nil {
					call = again
					continue
				}
			}
			canRetry = false
			for _, part := range parts {
				if !yield(part, nil) {
					return
				}
			}
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// Complete returns the whole answer. Its errors are those of Generate.
func (s *Session) Complete(ctx context.Context, request *Request) (*Completion, error) {
	return Collect(s.Generate(ctx, request))
}

// start sends the request, which nobody changes any more.
func (s *Session) start(ctx context.Context, request *Request) (*sessionCall, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	traceparent := traceparentOf(ctx)
	if len(traceparent) > maxTraceparentBytes || !utf8.ValidString(traceparent) {
		return nil, invalid(traceparentKey, "it is not the W3C's")
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.isClosed {
		return nil, closedError()
	}
	if s.stream != nil {
		if call := s.stream.start(request, traceparent); call != nil {
			return call, nil
		}
	}
	// Not of one request's context: the stream is for all of them.
	streamContext, cancel := context.WithCancel(context.Background())
	stream := newSessionStream(cancel)
	call := stream.start(request, traceparent)
	s.stream = stream
	s.open[stream] = true
	s.running.Go(func() {
		stream.run(streamContext, s.stub)
		s.mutex.Lock()
		delete(s.open, stream)
		s.mutex.Unlock()
	})
	return call, nil
}

func closedError() *Error {
	return &Error{Code: codes.Canceled, Reason: "CANCELLED", Message: "the session was closed"}
}

// isLost tells whether a stream ended that may just have been old, or its router takes no request any more.
func isLost(err error) bool {
	var failure *Error
	lost := []string{reasonUnavailable, reasonIdle, reasonDraining}
	return errors.As(err, &failure) && slices.Contains(lost, failure.Reason)
}

// sessionStream is one stream, from its opening to its end.
type sessionStream struct {
	cancel context.CancelFunc
	// Holds a token while there is something to send.
	hasOutgoing chan struct{}

	mutex    sync.Mutex
	calls    map[uint32]*sessionCall // By slot, until the router has ended them.
	free     []uint32                // Slots below len(calls) + len(free) that are not in use.
	outgoing []*pb.SessionRequest
	// Its router goes away, and begins no more requests.
	isDraining bool
	err        error // Why it has ended; nil: it has not.
}

func newSessionStream(cancel context.CancelFunc) *sessionStream {
	return &sessionStream{
		cancel:      cancel,
		calls:       map[uint32]*sessionCall{},
		hasOutgoing: make(chan struct{}, 1),
	}
}

// start returns nil if the stream takes no request any more.
func (s *sessionStream) start(request *Request, traceparent string) *sessionCall {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.err != nil || s.isDraining {
		return nil
	}
	slot := uint32(len(s.calls))
	if last := len(s.free) - 1; last >= 0 {
		slot, s.free = s.free[last], s.free[:last]
	}
	call := &sessionCall{stream: s, slot: slot, numUnfinished: numChoices(request), wake: make(chan struct{}, 1)}
	s.calls[slot] = call
	start := &pb.SessionStart{Slot: slot, Start: request, Traceparent: traceparent}
	s.enqueue(&pb.SessionRequest{Message: &pb.SessionRequest_Start{Start: start}})
	return call
}

// cancelSlot asks the router to end the call in its slot, unless it has.
func (s *sessionStream) cancelSlot(call *sessionCall) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.calls[call.slot] == call && s.err == nil {
		cancel := &pb.Cancel{Slot: call.slot}
		s.enqueue(&pb.SessionRequest{Message: &pb.SessionRequest_Cancel{Cancel: cancel}})
	}
}

// enqueue needs the mutex. Nothing waits here for the network: a start holds what its caller holds anyway.
func (s *sessionStream) enqueue(message *pb.SessionRequest) {
	s.outgoing = append(s.outgoing, message)
	signal(s.hasOutgoing)
}

// run opens the stream, and returns once it has ended.
func (s *sessionStream) run(ctx context.Context, stub pb.RouterServiceClient) {
	stream, err := stub.Session(ctx)
	if err != nil {
		s.end(ToError(err))
		return
	}
	var sending sync.WaitGroup
	sending.Go(func() { s.send(stream) })
	s.end(ToError(s.receive(stream)))
	sending.Wait()
}

func (s *sessionStream) send(stream pb.RouterService_SessionClient) {
	for {
		select {
		case <-stream.Context().Done():
			return
		case <-s.hasOutgoing:
		}
		s.mutex.Lock()
		messages := s.outgoing
		s.outgoing = nil
		s.mutex.Unlock()
		for _, message := range messages {
			if stream.Send(message) != nil {
				return // receive gets the status
			}
		}
	}
}

// receive returns why the stream has ended.
func (s *sessionStream) receive(stream pb.RouterService_SessionClient) error {
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return &Error{Code: codes.Unavailable, Reason: reasonUnavailable, Message: "the router ended the session"}
		}
		if err == nil {
			err = s.take(response)
		}
		if err != nil {
			return err
		}
	}
}

// end fails all calls, and ends the stream.
func (s *sessionStream) end(err error) {
	s.mutex.Lock()
	if s.err == nil {
		s.err = err
	}
	calls := s.calls
	s.calls, s.free, s.outgoing = nil, nil, nil
	s.mutex.Unlock()
	s.cancel()
	for _, call := range calls {
		call.end(s.failure())
	}
}

func (s *sessionStream) failure() error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.err
}

// call is what is in a slot; nil if nothing is. Once the stream has ended, that is so for all slots.
func (s *sessionStream) call(slot uint32) *sessionCall {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.calls[slot]
}

// release makes the slot free for another request.
func (s *sessionStream) release(slot uint32) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.err == nil {
		delete(s.calls, slot)
		s.free = append(s.free, slot)
	}
}

// drain has other streams get the requests that come.
func (s *sessionStream) drain() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.isDraining = true
}

// take gives each call what is its own of a message, in the order that the contract names.
func (s *sessionStream) take(response *pb.SessionResponse) error {
	give := func(slot uint32, part *Part) error {
		call := s.call(slot)
		if call == nil {
			return unknownSlot(slot)
		}
		call.add(part)
		return nil
	}
	for _, entry := range response.GetAccepted() {
		part := &Part{Message: &pb.GenerateResponse_Accepted{Accepted: entry.GetAccepted()}}
		if err := give(entry.GetSlot(), part); err != nil {
			return err
		}
	}
	for _, entry := range response.GetPlaced() {
		part := &Part{Message: &pb.GenerateResponse_Placed{Placed: entry.GetPlacement()}}
		if err := give(entry.GetSlot(), part); err != nil {
			return err
		}
	}
	for _, entry := range response.GetPromptLogprobs() {
		part := &Part{Message: &pb.GenerateResponse_PromptLogprobs{PromptLogprobs: entry.GetPromptLogprobs()}}
		if err := give(entry.GetSlot(), part); err != nil {
			return err
		}
	}
	if err := s.takeColumns(response); err != nil {
		return err
	}
	for _, entry := range response.GetParsed() {
		call := s.call(entry.GetSlot())
		if call == nil {
			return unknownSlot(entry.GetSlot())
		}
		call.addDelta(&pb.Delta{
			Choice: entry.GetChoice(), Reasoning: entry.GetReasoning(), ToolCalls: entry.GetToolCalls(),
		})
	}
	return s.takeEnds(response)
}

func (s *sessionStream) takeColumns(response *pb.SessionResponse) error {
	slots, choices, texts := response.GetSlots(), response.GetChoices(), response.GetTexts()
	numTokens, offsets, tokenIDs := response.GetNumTokens(), response.GetTokenOffsets(), response.GetTokenIds()
	logprobs := response.GetLogprobs()
	isAligned := func(length int) bool { return length == 0 || length == len(slots) }
	if !isAligned(len(choices)) || !isAligned(len(texts)) || len(numTokens) != len(slots) || len(offsets) != len(slots) {
		return protocolError("the columns of a message differ in length")
	}
	for i, slot := range slots {
		if int(numTokens[i]) > len(tokenIDs) {
			return protocolError("num_tokens does not add up to the tokens")
		}
		delta := &pb.Delta{TokenOffset: offsets[i], TokenIds: tokenIDs[:numTokens[i]:numTokens[i]]}
		tokenIDs = tokenIDs[numTokens[i]:]
		if len(choices) > 0 {
			delta.Choice = choices[i]
		}
		if len(texts) > 0 {
			delta.Text = texts[i]
		}
		if len(logprobs) > 0 && logprobs[0].GetSlot() == slot && logprobs[0].GetChoice() == delta.Choice {
			delta.Logprobs, logprobs = logprobs[0].GetTokens(), logprobs[1:]
		}
		call := s.call(slot)
		if call == nil {
			return unknownSlot(slot)
		}
		call.addDelta(delta)
	}
	if len(tokenIDs) > 0 || len(logprobs) > 0 {
		return protocolError("there are tokens or log probabilities of no request")
	}
	return nil
}

func (s *sessionStream) takeEnds(response *pb.SessionResponse) error {
	for _, entry := range response.GetFinished() {
		call := s.call(entry.GetSlot())
		if call == nil {
			return unknownSlot(entry.GetSlot())
		}
		call.numUnfinished--
		isLast := call.numUnfinished <= 0
		if isLast {
			s.release(call.slot) // Before its reader learns of the end, and sends the next request.
		}
		call.finish(entry.GetFinished(), isLast)
	}
	for _, entry := range response.GetFailures() {
		call := s.call(entry.GetSlot())
		if call == nil {
			return unknownSlot(entry.GetSlot())
		}
		failure := failureError(entry.GetFailure())
		if failure.Reason == reasonDraining {
			s.drain()
		}
		s.release(call.slot)
		call.end(failure)
	}
	return nil
}

func unknownSlot(slot uint32) error {
	return protocolError("the router answered in slot %d, which no request is in", slot)
}

// sessionCall is one request of a stream: the receiver of the stream adds parts, its reader takes them.
type sessionCall struct {
	stream *sessionStream
	slot   uint32
	// Of the receiver: choices that are still to end.
	numUnfinished int
	// Holds a token while there is something to take.
	wake chan struct{}

	mutex     sync.Mutex
	unread    []*Part
	numUnread int // Tokens and characters of these.
	isOver    bool
	err       error // Why it is over; nil: the answer is complete.
}

// next returns the parts that wait, at least one; io.EOF after the last.
func (c *sessionCall) next(ctx context.Context) ([]*Part, error) {
	for {
		c.mutex.Lock()
		parts, isOver, err := c.unread, c.isOver, c.err
		c.unread, c.numUnread = nil, 0
		c.mutex.Unlock()
		switch {
		case len(parts) > 0:
			return parts, nil
		case isOver && err == nil:
			return nil, io.EOF
		case isOver:
			return nil, err
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// drop ends the request, whatever its state.
func (c *sessionCall) drop() {
	if c.end(context.Canceled) {
		c.stream.cancelSlot(c)
	}
}

// end makes it over, unless it is; returns whether it was not.
func (c *sessionCall) end(err error) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isOver {
		return false
	}
	c.isOver, c.err = true, err
	signal(c.wake)
	return true
}

func (c *sessionCall) add(part *Part) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.isOver {
		c.unread = append(c.unread, part)
		signal(c.wake)
	}
}

// addDelta merges it with what waits; too much that waits ends the request.
func (c *sessionCall) addDelta(delta *pb.Delta) {
	if !c.tryAddDelta(delta) {
		c.stream.cancelSlot(c)
	}
}

func (c *sessionCall) tryAddDelta(delta *pb.Delta) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isOver {
		return true
	}
	c.numUnread += size(delta)
	if c.numUnread > maxUnread {
		message := "more than 65536 tokens and characters wait to be read"
		c.isOver, c.err = true, &Error{Code: codes.Aborted, Reason: reasonStalled, Message: message}
		c.unread = nil
		signal(c.wake)
		return false
	}
	if last := len(c.unread) - 1; last >= 0 && merge(c.unread[last].GetDelta(), delta) {
		return true
	}
	c.unread = append(c.unread, &Part{Message: &pb.GenerateResponse_Delta{Delta: delta}})
	signal(c.wake)
	return true
}

// finish adds the end of a choice; isLast: the request is over with it.
func (c *sessionCall) finish(finished *pb.ChoiceFinished, isLast bool) {
	c.add(&Part{Message: &pb.GenerateResponse_Finished{Finished: finished}})
	if isLast {
		c.end(nil)
	}
}

func size(delta *pb.Delta) int {
	count := len(delta.GetTokenIds()) + utf8.RuneCountInString(delta.GetText()) + len(delta.GetReasoning())
	for _, call := range delta.GetToolCalls() {
		count += len(call.GetArguments()) + 1
	}
	return count
}

// merge appends more to a delta that waits; false if they can't be one, or it is long: appending copies its text.
func merge(waiting, more *pb.Delta) bool {
	isText := func(delta *pb.Delta) bool { return delta.GetReasoning() == "" && len(delta.GetToolCalls()) == 0 }
	if waiting == nil || len(waiting.GetText()) > maxMergedBytes || waiting.GetChoice() != more.GetChoice() || !isText(waiting) || !isText(more) {
		return false
	}
	if len(waiting.GetTokenIds()) == 0 {
		waiting.TokenOffset = more.GetTokenOffset()
	}
	waiting.TokenIds = append(waiting.TokenIds, more.GetTokenIds()...)
	waiting.Text += more.GetText()
	waiting.Logprobs = append(waiting.Logprobs, more.GetLogprobs()...)
	return true
}

// signal puts a token into a channel that holds one, unless one is there.
func signal(channel chan struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}
