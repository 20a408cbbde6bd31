package kvshuttle.quickstart;

import com.google.protobuf.InvalidProtocolBufferException;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.protobuf.StatusProto;
import io.netty.handler.ssl.SslContextBuilder;
import java.io.File;
import java.util.Iterator;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import kvshuttle.v1.BeginTurnRequest;
import kvshuttle.v1.BeginTurnResponse;
import kvshuttle.v1.EndSessionRequest;
import kvshuttle.v1.EndTurnRequest;
import kvshuttle.v1.GetSessionRequest;
import kvshuttle.v1.ListSessionsRequest;
import kvshuttle.v1.ListSessionsResponse;
import kvshuttle.v1.SessionServiceGrpc;
import kvshuttle.v1.SessionServiceGrpc.SessionServiceBlockingStub;
import kvshuttle.v1.Turn;
import kvshuttle.v1.TurnOutcome;
import kvshuttle.v1.WatchSessionsRequest;
import kvshuttle.v1.WatchSessionsResponse;

/** Lists sessions, begins a turn, and follows it on a watch: {@code Quickstart 127.0.0.1:7400}. */
public final class Quickstart {
  private final SessionServiceBlockingStub stub;
  private final String sessionId;

  private Quickstart(Channel channel, String sessionId) {
    this.stub = SessionServiceGrpc.newBlockingStub(channel).withInterceptors(new Identity());
    this.sessionId = sessionId;
  }

  public static void main(String[] arguments) throws Exception {
    String target = arguments.length > 0 ? arguments[0] : "127.0.0.1:7400";
    String sessionId = arguments.length > 1 ? arguments[1] : "quickstart-java";
    ManagedChannel channel = channel(target);
    try {
      new Quickstart(channel, sessionId).run();
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  private void run() throws Exception {
    System.out.printf("%d sessions are known%n", count());

    // A refusal says why, and what to do.
    try {
      stub().getSession(GetSessionRequest.newBuilder().setSessionId("nobody").build());
    } catch (StatusRuntimeException refused) {
      if (refused.getStatus().getCode() != Status.Code.NOT_FOUND) {
        throw refused;
      }
      System.out.printf("refused: %s%n", reason(refused));
    }

    // The watch is there before the turn: what it tells first is the state, then every change.
    Context.CancellableContext watching = Context.current().withCancellation();
    watching.call(
        () -> {
          watch();
          return null;
        });
    watching.cancel(null);

    stub()
        .endSession(
            EndSessionRequest.newBuilder()
                .setSessionId(sessionId)
                .setRequestId(requestId())
                .build());
    System.out.println("session over");
  }

  private int count() {
    int known = 0;
    String token = "";
    do {
      ListSessionsResponse page =
          stub()
              .listSessions(
                  ListSessionsRequest.newBuilder().setPageSize(100).setPageToken(token).build());
      known += page.getSessionsCount();
      token = page.getNextPageToken();
    } while (!token.isEmpty());
    return known;
  }

  private void watch() {
    Iterator<WatchSessionsResponse> pieces =
        stub.watchSessions(WatchSessionsRequest.newBuilder().setSessionId(sessionId).build());
    boolean begun = false;
    while (pieces.hasNext()) {
      WatchSessionsResponse piece = pieces.next();
      if (piece.getSnapshot().getComplete() && !begun) {
        begun = true;
        turn();
      }
      if (piece.hasChanged() && piece.getChanged().getTurnsCount() > 0) {
        Turn last = piece.getChanged().getTurns(piece.getChanged().getTurnsCount() - 1);
        if (last.getOutcome() == TurnOutcome.TURN_OUTCOME_COMPLETED) {
          System.out.printf("watched: turn %d of %s has ended%n", last.getTurn(), sessionId);
          return;
        }
      }
    }
  }

  private void turn() {
    // The request id makes it safe to send this again.
    BeginTurnResponse answer =
        stub()
            .beginTurn(
                BeginTurnRequest.newBuilder()
                    .setSessionId(sessionId)
                    .setRequestId(requestId())
                    .build());
    Turn turn = answer.getTurn();
    System.out.printf(
        "turn %d runs on %s (%s)%n",
        turn.getTurn(), turn.getDecode().getUrl(), turn.getPlan().getReason());
    stub()
        .endTurn(
            EndTurnRequest.newBuilder()
                .setSessionId(sessionId)
                .setTurn(turn.getTurn())
                .setTurnToken(answer.getTurnToken())
                .setOutcome(TurnOutcome.TURN_OUTCOME_COMPLETED)
                .setRequestId(requestId())
                .build());
  }

  /** For one call: every call has a deadline, a watch has none. */
  private SessionServiceBlockingStub stub() {
    return stub.withDeadlineAfter(5, TimeUnit.SECONDS);
  }

  private static String requestId() {
    return UUID.randomUUID().toString();
  }

  private static String reason(StatusRuntimeException refused)
      throws InvalidProtocolBufferException {
    for (com.google.protobuf.Any detail :
        StatusProto.fromThrowable(refused).getDetailsList()) {
      if (detail.is(com.google.rpc.ErrorInfo.class)) {
        return detail.unpack(com.google.rpc.ErrorInfo.class).getReason();
      }
    }
    return "";
  }

  /** TLS where CA, and for mTLS CERT and KEY, name PEM files. */
  private static ManagedChannel channel(String target) throws Exception {
    NettyChannelBuilder builder = NettyChannelBuilder.forTarget(target);
    String ca = System.getenv("CA");
    if (ca == null) {
      return builder.usePlaintext().build();
    }
    SslContextBuilder tls = GrpcSslContexts.forClient().trustManager(new File(ca));
    String cert = System.getenv("CERT");
    if (cert != null) {
      tls.keyManager(new File(cert), new File(System.getenv("KEY")));
    }
    return builder.sslContext(tls.build()).build();
  }

  /** Adds the bearer token in TOKEN, and TENANT, whom a gateway or an operator acts for. */
  private static final class Identity implements ClientInterceptor {
    private static void add(Metadata headers, String name, String variable, String prefix) {
      String value = System.getenv(variable);
      if (value != null) {
        headers.put(
            Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), prefix + value);
      }
    }

    @Override
    public <Q, A> ClientCall<Q, A> interceptCall(
        MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
      return new SimpleForwardingClientCall<Q, A>(next.newCall(method, options)) {
        @Override
        public void start(Listener<A> listener, Metadata headers) {
          add(headers, "authorization", "TOKEN", "Bearer ");
          add(headers, "kvshuttle-tenant", "TENANT", "");
          super.start(listener, headers);
        }
      };
    }
  }
}
