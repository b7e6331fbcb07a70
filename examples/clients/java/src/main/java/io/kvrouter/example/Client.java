package io.kvrouter.example;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.kvrouter.v1.BookingKey;
import io.kvrouter.v1.FrontendServiceFreeRequest;
import io.kvrouter.v1.FrontendServiceGenerateRequest;
import io.kvrouter.v1.FrontendServiceGenerateResponse;
import io.kvrouter.v1.FrontendServiceGrpc;
import io.kvrouter.v1.FrontendServiceGrpc.FrontendServiceBlockingStub;
import io.kvrouter.v1.FrontendServiceMarkPrefillCompleteRequest;
import io.kvrouter.v1.FrontendServiceSelectWorkerRequest;
import io.kvrouter.v1.RoutingRequest;
import io.kvrouter.v1.Selection;
import io.kvrouter.v1.TokenIds;
import java.time.Duration;
import java.time.Instant;
import java.util.Iterator;
import java.util.List;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;

/**
 * Calls a Frontend over gRPC: a stream, a cancellation, the manual life cycle, errors, and a reconnection. Prints one
 * line for each step. For the last step restart the Frontend.
 */
public final class Client {
  private static final List<Integer> PROMPT = IntStream.rangeClosed(1, 256).boxed().toList();
  private static final int ENDLESS = 50_000;
  private static final long CALL_SECONDS = 30;
  private static final Duration RETRY_TIME = Duration.ofSeconds(60);

  private final FrontendServiceBlockingStub frontend;
  private final String model;

  private Client(FrontendServiceBlockingStub frontend, String model) {
    this.frontend = frontend;
    this.model = model;
  }

  /** What a finished request returned. */
  private record Result(long worker, int tokens, int characters) {
    @Override
    public String toString() {
      return "worker %d, %d tokens".formatted(worker, tokens);
    }
  }

  public static void main(String[] arguments) throws Exception {
    if (arguments.length != 2) {
      System.err.println("usage: Client TARGET MODEL, such as Client 127.0.0.1:8001 mock-model");
      System.exit(2);
    }
    ManagedChannel channel =
        Grpc.newChannelBuilder(arguments[0], InsecureChannelCredentials.create()).build();
    try {
      Client client =
          new Client(FrontendServiceGrpc.newBlockingStub(channel).withWaitForReady(), arguments[1]);
      client.stream();
      client.text();
      client.cancel();
      client.manualLifeCycle();
      client.unknownModel();
      client.reconnect();
    } finally {
      channel.shutdownNow().awaitTermination(CALL_SECONDS, TimeUnit.SECONDS);
    }
  }

  private void stream() throws Exception {
    System.out.println("stream: " + retrying(() -> generate(request(16).build())));
  }

  /** Sends a text instead of token ids, and gets the output as text too. */
  private void text() throws Exception {
    FrontendServiceGenerateRequest request =
        request(16).setPromptText("Once upon a time").setReturnText(true).build();
    Result result = retrying(() -> generate(request));
    System.out.printf("text: %d characters, %d tokens%n", result.characters(), result.tokens());
  }

  private void cancel() throws Exception {
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      Iterator<FrontendServiceGenerateResponse> pieces =
          context.call(() -> frontend.generate(request(ENDLESS).build()));
      for (int piece = 0; piece < 3; piece++) {
        pieces.next();
      }
      context.cancel(null);
      StatusRuntimeException error = failed(() -> drained(pieces));
      System.out.println("cancel: after 3 pieces, " + error.getStatus().getCode());
    }
  }

  /** Books a worker as a client that dispatches by itself does. Shows meanwhile what a busy worker answers. */
  private void manualLifeCycle() throws Exception {
    BookingKey booking = BookingKey.newBuilder().setRequestId(UUID.randomUUID().toString()).build();
    FrontendServiceSelectWorkerRequest.Builder request =
        FrontendServiceSelectWorkerRequest.newBuilder().setBooking(booking);
    request.setRequest(
        RoutingRequest.newBuilder()
            .setModel(model)
            .setTokenIds(TokenIds.newBuilder().addAllIds(PROMPT))
            .setMaxOutputTokens(16));
    Selection chosen = retrying(() -> limited().selectWorker(request.build())).getSelection();
    // Only the booked worker may serve this request, and only if that worker has no active block.
    FrontendServiceGenerateRequest.Builder builder = request(16);
    builder.getConstraintsBuilder().setWorkerId(chosen.getRank().getWorkerId());
    builder.getOverridesBuilder().setActiveDecodeBlocksThreshold(0);
    FrontendServiceGenerateRequest busy = builder.build();
    try {
      System.out.printf(
          "book: worker %d at %s%n", chosen.getRank().getWorkerId(), chosen.getEndpoint());
      // Here such a client sends its request to the worker. The first token has arrived:
      FrontendServiceMarkPrefillCompleteRequest complete =
          FrontendServiceMarkPrefillCompleteRequest.newBuilder().setBooking(booking).build();
      System.out.println(
          "prefill complete: known " + limited().markPrefillComplete(complete).getKnown());
      sayFailure("all busy", failed(() -> generate(busy)));
    } finally {
      FrontendServiceFreeRequest free =
          FrontendServiceFreeRequest.newBuilder().setBooking(booking).build();
      System.out.println("free: known " + limited().free(free).getKnown());
    }
    System.out.println("retry: " + retrying(() -> generate(busy)));
  }

  private void unknownModel() throws Exception {
    FrontendServiceGenerateRequest request = request(1).setModel("no-such-model").build();
    sayFailure("unknown model", failed(() -> generate(request)));
  }

  /** Loses the Frontend during a stream, and sends the request again. */
  private void reconnect() throws Exception {
    Iterator<FrontendServiceGenerateResponse> pieces = frontend.generate(request(ENDLESS).build());
    pieces.next();
    System.out.println("reconnect: restart the Frontend now");
    StatusRuntimeException error = failed(() -> drained(pieces));
    if (retryDelay(error).isEmpty()) {
      throw error;
    }
    Result result = retrying(() -> generate(request(16).build()));
    System.out.printf("reconnected: after %s, %s%n", error.getStatus().getCode(), result);
  }

  private FrontendServiceBlockingStub limited() {
    return frontend.withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS);
  }

  private FrontendServiceGenerateRequest.Builder request(int maxTokens) {
    FrontendServiceGenerateRequest.Builder request =
        FrontendServiceGenerateRequest.newBuilder()
            .setModel(model)
            .setTokenIds(TokenIds.newBuilder().addAllIds(PROMPT));
    request.getStopConditionsBuilder().setMaxTokens(maxTokens).setIgnoreEos(true);
    return request;
  }

  /** Runs a request to its end. */
  private Result generate(FrontendServiceGenerateRequest request) {
    return drained(limited().generate(request));
  }

  private static Result drained(Iterator<FrontendServiceGenerateResponse> pieces) {
    long worker = 0;
    int tokens = 0;
    int characters = 0;
    while (pieces.hasNext()) {
      FrontendServiceGenerateResponse piece = pieces.next();
      if (piece.hasRouting()) {
        worker = piece.getRouting().getRank().getWorkerId();
      }
      tokens += piece.getOutput().getTokenIdsCount();
      characters += piece.getOutput().getText().length();
    }
    return new Result(worker, tokens, characters);
  }

  /** Returns the answer of a call, which is repeated while the server says that a retry may succeed. */
  private static <T> T retrying(Callable<T> call) throws Exception {
    Instant giveUp = Instant.now().plus(RETRY_TIME);
    while (true) {
      try {
        return call.call();
      } catch (StatusRuntimeException error) {
        Optional<Duration> delay = retryDelay(error);
        if (delay.isEmpty() || Instant.now().plus(delay.get()).isAfter(giveUp)) {
          throw error;
        }
        Thread.sleep(delay.get().toMillis());
      }
    }
  }

  /** Returns the error of a call that is expected to fail. */
  private static StatusRuntimeException failed(Callable<?> call) throws Exception {
    try {
      call.call();
    } catch (StatusRuntimeException error) {
      return error;
    }
    throw new IllegalStateException("expected the call to fail, but it succeeded");
  }

  /** Returns the time to wait before a retry; empty if a retry cannot succeed. */
  private static Optional<Duration> retryDelay(StatusRuntimeException error) {
    Optional<Duration> delay = detail(error, RetryInfo.class).map(Client::delayOf);
    if (delay.isPresent()) {
      return delay;
    }
    // The library itself reports a lost connection, without details. The retry waits until it is connected again.
    boolean lost = error.getStatus().getCode() == Status.Code.UNAVAILABLE;
    return lost ? Optional.of(Duration.ZERO) : Optional.empty();
  }

  private static Duration delayOf(RetryInfo retry) {
    return Duration.ofSeconds(retry.getRetryDelay().getSeconds(), retry.getRetryDelay().getNanos());
  }

  /** Returns the detail of a type from {@code grpc-status-details-bin}; empty if the error has none. */
  private static <T extends Message> Optional<T> detail(StatusRuntimeException error, Class<T> type) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status == null) {
      return Optional.empty();
    }
    return status.getDetailsList().stream()
        .filter(packed -> packed.is(type))
        .findFirst()
        .map(packed -> unpacked(packed, type));
  }

  private static <T extends Message> T unpacked(Any packed, Class<T> type) {
    try {
      return packed.unpack(type);
    } catch (InvalidProtocolBufferException error) {
      throw new IllegalStateException("the server sent a detail that cannot be parsed", error);
    }
  }

  private static void sayFailure(String step, StatusRuntimeException error) {
    ErrorInfo info = detail(error, ErrorInfo.class).orElseGet(ErrorInfo::getDefaultInstance);
    String retry =
        detail(error, RetryInfo.class)
            .map(found -> "retry in %d ms".formatted(delayOf(found).toMillis()))
            .orElse("no retry");
    String values = info.getMetadataOrDefault("known_values", "none");
    System.out.printf(
        "%s: %s, %s, %s, known values: %s%n",
        step, error.getStatus().getCode(), info.getReason(), retry, values);
  }
}
