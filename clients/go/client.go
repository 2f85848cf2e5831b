// Package quartet is a client of Quartet's routers.
//
//	client, err := quartet.Dial("127.0.0.1:50050", nil)
//	...
//	defer client.Close()
//	for part, err := range client.Generate(ctx, quartet.Text("Once upon a time")) {
//		if err != nil {
//			return err
//		}
//		fmt.Print(part.GetDelta().GetText())
//	}
//
// Requests and parts of answers are the messages of the contract (protos/quartet/v1/router.proto), whose comments say
// what each field means. Errors of routers are *Error.
package quartet

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	pb "quartet/codegen/gen/go/quartet/v1"
)

const (
	// What a router sends at most, and what it takes at most.
	maxMessageBytes = 64 << 20
	// What may be on the way of one answer that its reader has not taken. By default it grows with the speed of the
	// network, to seconds of tokens; so the router keeps them instead, and merges them into few messages.
	streamWindowBytes = 64 << 10
	connWindowBytes   = 1 << 20
)

// Client talks to one router. All methods may be called from any number of goroutines.
type Client struct {
	connection *grpc.ClientConn
	stub       pb.RouterServiceClient
}

// Dial makes a client of the router at address, host:port. It connects at the first request, and again after each loss.
// A config of nil means no TLS; LoadTLS makes one from files. No proxy is used. options go after those of this package.
func Dial(address string, config *tls.Config, options ...grpc.DialOption) (*Client, error) {
	transport := insecure.NewCredentials()
	if config != nil {
		transport = credentials.NewTLS(config)
	}
	ours := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		grpc.WithStaticStreamWindowSize(streamWindowBytes),
		grpc.WithStaticConnWindowSize(connWindowBytes),
		// Without pings a host that lost power would hang every request.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}),
		// The default backs off to two minutes: far longer than a router takes to restart.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second,
			},
			MinConnectTimeout: 3 * time.Second,
		}),
	}
	connection, err := grpc.NewClient(address, append(ours, options...)...)
	if err != nil {
		return nil, fmt.Errorf("quartet: %s: %w", address, err)
	}
	return &Client{connection: connection, stub: pb.NewRouterServiceClient(connection)}, nil
}

// LoadTLS makes a config that trusts the authorities in caFile and shows the certificate in certFile, with the key in
// keyFile; all are PEM. Leave the last two empty for routers that ask for no certificate.
func LoadTLS(caFile, certFile, keyFile string) (*tls.Config, error) {
	authorities, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("quartet: authorities: %w", err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(authorities) {
		return nil, fmt.Errorf("quartet: authorities: %s holds no certificate in PEM form", caFile)
	}
	if certFile != "" || keyFile != "" {
		certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			return nil, fmt.Errorf("quartet: certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return config, nil
}

// Stub is the contract itself, for what this package has no method for. ToError makes an *Error of what it returns.
func (c *Client) Stub() pb.RouterServiceClient { return c.stub }

// Close ends all requests and the connection.
func (c *Client) Close() error { return c.connection.Close() }

// Generate sends the request once the answer is iterated, on a stream of its own, and yields the parts of the answer:
// accepted, deltas, and a finished for each choice. Use the answer once.
//
// The request is cancelled when ctx ends or the loop is left, at any time. What is yielded as an error is the last of
// the answer: an *Error of the router, or of the connection to it; context.Cause(ctx) once ctx has ended.
func (c *Client) Generate(ctx context.Context, request *Request) iter.Seq2[*Part, error] {
	return func(yield func(*Part, error) bool) {
		if err := check(request); err != nil {
			yield(nil, err)
			return
		}
		streamContext, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.begin(streamContext, request)
		numUnfinished := numChoices(request)
		for err == nil {
			var part *Part
			if part, err = stream.Recv(); err == nil {
				if part.GetFinished() != nil {
					numUnfinished--
				}
				if !yield(part, nil) {
					return
				}
			}
		}
		switch {
		case !errors.Is(err, io.EOF):
			yield(nil, errorOf(ctx, err))
		case numUnfinished != 0:
			yield(nil, protocolError("the router ended the answer with %d choices unfinished", numUnfinished))
		}
	}
}

// Complete returns the whole answer. Its errors are those of Generate.
func (c *Client) Complete(ctx context.Context, request *Request) (*Completion, error) {
	return Collect(c.Generate(ctx, request))
}

func (c *Client) begin(ctx context.Context, request *Request) (pb.RouterService_GenerateClient, error) {
	stream, err := c.stub.Generate(ctx)
	if err != nil {
		return nil, err
	}
	start := &pb.GenerateRequest{Message: &pb.GenerateRequest_Start{Start: request}}
	// If the stream has ended already, reading it gives the status.
	if err := stream.Send(start); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return stream, stream.CloseSend()
}

func numChoices(request *Request) int {
	if request.NumChoices == nil {
		return 1
	}
	return int(request.GetNumChoices())
}
