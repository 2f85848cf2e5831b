// quartet-go sends prompts to a router and prints the answers. It is an example of a client, and a tool for tests.
//
//	quartet-go 'Once upon a time'
//	quartet-go -chat -image models/tiny/pictures/shapes.jpg 'Describe the picture.'
//	quartet-go -chat 'What is 17 plus 25?' 'What is 3 plus 4?'
//
// Several prompts go over one session, all at once. Ctrl-C cancels what runs.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/protobuf/proto"

	quartet "quartet/clients/go"
)

// exitCancelled is what a shell says of a program that Ctrl-C has ended.
const exitCancelled = 130

type arguments struct {
	address            string
	ca, cert, key      string
	isChat, ignoresEnd bool
	pictures           [][]byte
	maxTokens          uint
	temperature        *float64
	prompts            []string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	parsed, err := parse()
	if err == nil {
		err = run(ctx, parsed)
	}
	switch {
	case err == nil:
	case errors.Is(err, context.Canceled):
		os.Exit(exitCancelled)
	default:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func parse() (*arguments, error) {
	parsed := &arguments{}
	flag.StringVar(&parsed.address, "address", "127.0.0.1:50050", "the router, `host:port`")
	flag.StringVar(&parsed.ca, "ca", "", "authorities, a PEM `file`: use TLS")
	flag.StringVar(&parsed.cert, "cert", "", "own certificate, a PEM `file`")
	flag.StringVar(&parsed.key, "key", "", "its key, a PEM `file`")
	flag.BoolVar(&parsed.isChat, "chat", false, "the prompts are messages of a user, for the chat template")
	flag.BoolVar(&parsed.ignoresEnd, "ignore-eos", false, "go on where the model would end")
	flag.UintVar(&parsed.maxTokens, "max-tokens", 256, "tokens of an answer at most")
	flag.Func("temperature", "0 takes the most likely tokens (default 1)", func(text string) error {
		parsed.temperature = new(float64)
		_, err := fmt.Sscan(text, parsed.temperature)
		return err
	})
	flag.Func("image", "a picture for each prompt, a `file`; may come several times", func(name string) error {
		picture, err := os.ReadFile(name)
		parsed.pictures = append(parsed.pictures, picture)
		return err
	})
	flag.Parse()
	parsed.prompts = flag.Args()
	switch {
	case len(parsed.prompts) == 0:
		return nil, errors.New("quartet-go: give at least one prompt")
	case len(parsed.pictures) > 0 && !parsed.isChat:
		return nil, errors.New("quartet-go: -image goes with -chat")
	}
	return parsed, nil
}

func run(ctx context.Context, parsed *arguments) error {
	var config *tls.Config
	if parsed.ca != "" {
		var err error
		if config, err = quartet.LoadTLS(parsed.ca, parsed.cert, parsed.key); err != nil {
			return err
		}
	}
	client, err := quartet.Dial(parsed.address, config)
	if err != nil {
		return err
	}
	defer client.Close()
	if len(parsed.prompts) == 1 {
		return show(ctx, client, parsed.request(parsed.prompts[0]))
	}
	return showAll(ctx, client, parsed)
}

func (a *arguments) request(prompt string) *quartet.Request {
	request := quartet.Text(prompt)
	if a.isChat {
		request = quartet.Chat(quartet.User(prompt, a.pictures...))
	}
	request.Sampling = &quartet.Sampling{MaxTokens: proto.Uint32(uint32(a.maxTokens)), IgnoreEos: &a.ignoresEnd}
	if a.temperature != nil {
		request.Sampling.Temperature = proto.Float32(float32(*a.temperature))
	}
	return request
}

// show prints an answer as it comes.
func show(ctx context.Context, client *quartet.Client, request *quartet.Request) error {
	for part, err := range client.Generate(ctx, request) {
		if err != nil {
			return err
		}
		fmt.Print(part.GetDelta().GetReasoning(), part.GetDelta().GetText())
	}
	fmt.Println()
	return nil
}

// showAll prints each answer once it is whole, in the order of the prompts.
func showAll(ctx context.Context, client *quartet.Client, parsed *arguments) error {
	type result struct {
		completion *quartet.Completion
		err        error
	}
	session := client.Session()
	defer session.Close()
	results := make([]chan result, len(parsed.prompts))
	for i, prompt := range parsed.prompts {
		results[i] = make(chan result, 1)
		go func() {
			completion, err := session.Complete(ctx, parsed.request(prompt))
			results[i] <- result{completion, err}
		}()
	}
	for i, prompt := range parsed.prompts {
		result := <-results[i]
		if result.err != nil {
			return fmt.Errorf("%q: %w", prompt, result.err)
		}
		fmt.Printf("%s\n%s\n\n", prompt, result.completion.Text())
	}
	return nil
}
