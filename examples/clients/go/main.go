// Command client calls a Frontend over gRPC: a stream, a cancellation, the manual life cycle, errors, and a
// reconnection. It prints one line for each step. For the last step restart the Frontend.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kv "kvrouter.example/client/kvrouter/v1"
)

const (
	endless     = 50_000
	callTimeout = 30 * time.Second
	retryTime   = 60 * time.Second
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: client TARGET MODEL, such as client 127.0.0.1:8001 mock-model")
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(target, model string) error {
	connection, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		return err
	}
	defer connection.Close()
	c := client{kv.NewFrontendServiceClient(connection), model}
	ctx := context.Background()
	for _, step := range []func(context.Context) error{
		c.stream, c.text, c.cancel, c.manualLifeCycle, c.unknownModel, c.reconnect,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// client does the steps over one channel.
type client struct {
	frontend kv.FrontendServiceClient
	model    string
}

// result is what a finished request returned.
type result struct {
	worker     uint64
	tokens     int
	characters int
}

func (r result) String() string { return fmt.Sprintf("worker %d, %d tokens", r.worker, r.tokens) }

func (c client) stream(ctx context.Context) error {
	done, err := retrying(ctx, func(ctx context.Context) (result, error) { return c.generate(ctx, c.request(16)) })
	if err != nil {
		return err
	}
	fmt.Println("stream:", done)
	return nil
}

// text sends a text instead of token ids, and gets the output as text too.
func (c client) text(ctx context.Context) error {
	request := c.request(16)
	request.Prompt = &kv.FrontendServiceGenerateRequest_PromptText{PromptText: "Once upon a time"}
	request.ReturnText = true
	done, err := retrying(ctx, func(ctx context.Context) (result, error) { return c.generate(ctx, request) })
	if err != nil {
		return err
	}
	fmt.Printf("text: %d characters, %d tokens\n", done.characters, done.tokens)
	return nil
}

func (c client) cancel(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.frontend.Generate(ctx, c.request(endless))
	if err != nil {
		return err
	}
	for range 3 {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
	cancel()
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Canceled {
		return fmt.Errorf("expected the stream to be cancelled: %w", err)
	}
	fmt.Println("cancel: after 3 pieces, CANCELLED")
	return nil
}

// manualLifeCycle books a worker as a client that dispatches by itself does. It shows meanwhile what a busy worker answers.
func (c client) manualLifeCycle(ctx context.Context) error {
	booking := &kv.BookingKey{RequestId: rand.Text()}
	answer, err := retrying(ctx, func(ctx context.Context) (*kv.FrontendServiceSelectWorkerResponse, error) {
		return c.frontend.SelectWorker(ctx, &kv.FrontendServiceSelectWorkerRequest{
			Request: &kv.RoutingRequest{
				Model:           c.model,
				Prompt:          &kv.RoutingRequest_TokenIds{TokenIds: &kv.TokenIds{Ids: prompt()}},
				MaxOutputTokens: proto.Uint32(16),
			},
			Booking: booking,
		})
	})
	if err != nil {
		return err
	}
	chosen := answer.GetSelection()
	fmt.Printf("book: worker %d at %s\n", chosen.GetRank().GetWorkerId(), chosen.GetEndpoint())
	// Only the booked worker may serve this request, and only if that worker has no active block.
	busy := c.request(16)
	busy.Constraints = &kv.RoutingConstraints{WorkerId: proto.Uint64(chosen.GetRank().GetWorkerId())}
	busy.Overrides = &kv.RoutingOverrides{ActiveDecodeBlocksThreshold: proto.Float64(0)}
	if err := errors.Join(c.whileBooked(ctx, booking, busy), c.free(ctx, booking)); err != nil {
		return err
	}
	done, err := retrying(ctx, func(ctx context.Context) (result, error) { return c.generate(ctx, busy) })
	if err != nil {
		return err
	}
	fmt.Println("retry:", done)
	return nil
}

func (c client) whileBooked(ctx context.Context, booking *kv.BookingKey, busy *kv.FrontendServiceGenerateRequest) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	// Here such a client sends its request to the worker. The first token has arrived:
	marked, err := c.frontend.MarkPrefillComplete(ctx, &kv.FrontendServiceMarkPrefillCompleteRequest{Booking: booking})
	if err != nil {
		return err
	}
	fmt.Println("prefill complete: known", marked.GetKnown())
	_, err = c.generate(ctx, busy)
	return sayFailure("all busy", codes.ResourceExhausted, err)
}

func (c client) free(ctx context.Context, booking *kv.BookingKey) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	freed, err := c.frontend.Free(ctx, &kv.FrontendServiceFreeRequest{Booking: booking})
	if err != nil {
		return err
	}
	fmt.Println("free: known", freed.GetKnown())
	return nil
}

func (c client) unknownModel(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	request := c.request(1)
	request.Model = "no-such-model"
	_, err := c.generate(ctx, request)
	return sayFailure("unknown model", codes.NotFound, err)
}

// reconnect loses the Frontend during a stream, and sends the request again.
func (c client) reconnect(ctx context.Context) error {
	stream, err := c.frontend.Generate(ctx, c.request(endless))
	if err != nil {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	fmt.Println("reconnect: restart the Frontend now")
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Unavailable {
		return fmt.Errorf("expected the stream to break: %w", err)
	}
	done, err := retrying(ctx, func(ctx context.Context) (result, error) { return c.generate(ctx, c.request(16)) })
	if err != nil {
		return err
	}
	fmt.Println("reconnected: after UNAVAILABLE,", done)
	return nil
}

func (c client) request(maxTokens uint32) *kv.FrontendServiceGenerateRequest {
	return &kv.FrontendServiceGenerateRequest{
		Model:          c.model,
		Prompt:         &kv.FrontendServiceGenerateRequest_TokenIds{TokenIds: &kv.TokenIds{Ids: prompt()}},
		StopConditions: &kv.StopConditions{MaxTokens: maxTokens, IgnoreEos: true},
	}
}

// generate runs a request to its end.
func (c client) generate(ctx context.Context, request *kv.FrontendServiceGenerateRequest) (result, error) {
	var done result
	stream, err := c.frontend.Generate(ctx, request)
	if err != nil {
		return done, err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return done, nil
		}
		if err != nil {
			return done, err
		}
		if routing := piece.GetRouting(); routing != nil {
			done.worker = routing.GetRank().GetWorkerId()
		}
		done.tokens += len(piece.GetOutput().GetTokenIds())
		done.characters += utf8.RuneCountInString(piece.GetOutput().GetText())
	}
}

func prompt() []uint32 {
	ids := make([]uint32, 256)
	for i := range ids {
		ids[i] = uint32(i + 1)
	}
	return ids
}

// retrying repeats a call while the server says that a retry may succeed.
func retrying[T any](ctx context.Context, call func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, retryTime)
	defer cancel()
	for {
		attempt, end := context.WithTimeout(ctx, callTimeout)
		answer, err := call(attempt)
		end()
		if err == nil {
			return answer, nil
		}
		pause, may := retryPause(err)
		if !may {
			return answer, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return answer, err
		}
	}
}

// retryPause returns the time to wait before a retry, and whether a retry may succeed.
func retryPause(err error) (time.Duration, bool) {
	if retry := detail[*errdetails.RetryInfo](err); retry != nil {
		return retry.GetRetryDelay().AsDuration(), true
	}
	// The library itself reports a lost connection, without details. The retry waits until it is connected again.
	return 0, status.Code(err) == codes.Unavailable
}

// detail returns the detail of a type from grpc-status-details-bin; nil if the error has none.
func detail[T comparable](err error) T {
	for _, found := range status.Convert(err).Details() {
		if typed, ok := found.(T); ok {
			return typed
		}
	}
	var none T
	return none
}

var codeNames = map[codes.Code]string{codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.NotFound: "NOT_FOUND"}

// sayFailure prints the details of an error that was expected, and returns any other.
func sayFailure(step string, expected codes.Code, err error) error {
	if status.Code(err) != expected {
		return fmt.Errorf("%s: expected %v, received: %w", step, expected, err)
	}
	info, pause, values := detail[*kv.ErrorInfo](err), "no retry", "none"
	if retry := detail[*errdetails.RetryInfo](err); retry != nil {
		pause = fmt.Sprintf("retry in %d ms", retry.GetRetryDelay().AsDuration().Milliseconds())
	}
	if known := info.GetKnownValues(); len(known) > 0 {
		values = strings.Join(known, ", ")
	}
	reason := detail[*errdetails.ErrorInfo](err).GetReason()
	fmt.Printf("%s: %s, %s, %s, known values: %s\n", step, codeNames[expected], reason, pause, values)
	return nil
}
