package quartet

import (
	"iter"
	"maps"
	"slices"
	"strings"

	pb "quartet/codegen/gen/go/quartet/v1"
)

// Completion is all answers to a request.
type Completion struct {
	// Accepted names the request, its seed and its model.
	Accepted *pb.Accepted
	// Choices are the answers, by number.
	Choices []Choice
	// PromptLogprobs are log probabilities of the prompt, if they were asked for.
	PromptLogprobs *pb.PromptLogprobs
}

// Text is that of the first choice.
func (c *Completion) Text() string {
	if len(c.Choices) == 0 {
		return ""
	}
	return c.Choices[0].Text
}

// Choice is one whole answer.
type Choice struct {
	Text     string
	TokenIDs []uint32
	// Reasoning is what the model thought before.
	Reasoning string
	// ToolCalls are those that are complete, to be run.
	ToolCalls []*pb.ToolCall
	// Logprobs has an entry a token, if they were asked for.
	Logprobs []*pb.TokenLogprobs
	// Finished says why the answer ended, what it used, and where the time went.
	Finished *pb.ChoiceFinished
}

// Collect makes a Completion of the parts of an answer. Its errors are those of the parts, or that some are missing.
func Collect(parts iter.Seq2[*Part, error]) (*Completion, error) {
	completion := &Completion{}
	answers := map[uint32]*answer{}
	for part, err := range parts {
		if err != nil {
			return nil, err
		}
		switch message := part.GetMessage().(type) {
		case *pb.GenerateResponse_Accepted:
			completion.Accepted = message.Accepted
		case *pb.GenerateResponse_PromptLogprobs:
			completion.PromptLogprobs = message.PromptLogprobs
		case *pb.GenerateResponse_Delta:
			if err := answerOf(answers, message.Delta.GetChoice()).add(message.Delta); err != nil {
				return nil, err
			}
		case *pb.GenerateResponse_Finished:
			answerOf(answers, message.Finished.GetChoice()).finished = message.Finished
		}
	}
	for _, number := range slices.Sorted(maps.Keys(answers)) {
		completion.Choices = append(completion.Choices, answers[number].choice())
	}
	return completion, nil
}

// answer gathers the deltas of one choice.
type answer struct {
	text, reasoning strings.Builder
	tokenIDs        []uint32
	logprobs        []*pb.TokenLogprobs
	calls           map[uint32]*toolCall
	finished        *pb.ChoiceFinished
}

type toolCall struct {
	id, name   string
	arguments  strings.Builder
	isComplete bool
}

func answerOf(answers map[uint32]*answer, choice uint32) *answer {
	if answers[choice] == nil {
		answers[choice] = &answer{calls: map[uint32]*toolCall{}}
	}
	return answers[choice]
}

func (a *answer) add(delta *pb.Delta) error {
	if len(delta.GetTokenIds()) > 0 && int(delta.GetTokenOffset()) != len(a.tokenIDs) {
		return protocolError("tokens before number %d of the answer are missing", delta.GetTokenOffset())
	}
	a.text.WriteString(delta.GetText())
	a.reasoning.WriteString(delta.GetReasoning())
	a.tokenIDs = append(a.tokenIDs, delta.GetTokenIds()...)
	a.logprobs = append(a.logprobs, delta.GetLogprobs()...)
	for _, part := range delta.GetToolCalls() {
		call := a.calls[part.GetIndex()]
		if call == nil {
			call = &toolCall{id: part.GetId(), name: part.GetName()}
			a.calls[part.GetIndex()] = call
		}
		call.arguments.WriteString(part.GetArguments())
		call.isComplete = call.isComplete || part.GetIsComplete()
	}
	return nil
}

func (a *answer) choice() Choice {
	choice := Choice{
		Text:      a.text.String(),
		TokenIDs:  a.tokenIDs,
		Reasoning: a.reasoning.String(),
		Logprobs:  a.logprobs,
		Finished:  a.finished,
	}
	for _, index := range slices.Sorted(maps.Keys(a.calls)) {
		if call := a.calls[index]; call.isComplete {
			choice.ToolCalls = append(choice.ToolCalls, &pb.ToolCall{
				Id: call.id, Name: call.name, Arguments: call.arguments.String(),
			})
		}
	}
	return choice
}
