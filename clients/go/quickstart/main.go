// Quickstart lists sessions, begins a turn, and follows it on a watch.
//
//	quickstart 127.0.0.1:7400
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	kvshuttle "kvshuttle.example/client/v1"
)

func main() {
	log.SetFlags(0)
	target, sessionID := argument(1, "127.0.0.1:7400"), argument(2, "quickstart-go")
	conn, err := grpc.Dial(target, security())
	check(err)
	defer conn.Close()
	sessions := kvshuttle.NewSessionServiceClient(conn)

	fmt.Printf("%d sessions are known\n", count(sessions))

	// A refusal says why, and what to do.
	ctx, cancel := deadline()
	_, err = sessions.GetSession(ctx, &kvshuttle.GetSessionRequest{SessionId: "nobody"})
	cancel()
	if status.Code(err) != codes.NotFound {
		log.Fatalf("not refused: %v", err)
	}
	fmt.Printf("refused: %s\n", reason(err))

	// The watch is there before the turn: what it tells first is the state, then every change.
	watching, stop := context.WithCancel(identity(context.Background()))
	defer stop()
	watch, err := sessions.WatchSessions(watching, &kvshuttle.WatchSessionsRequest{SessionId: sessionID})
	check(err)
	begun := false
	for {
		piece, err := watch.Recv()
		check(err)
		if snapshot := piece.GetSnapshot(); snapshot.GetComplete() && !begun {
			begun = true
			turn(sessions, sessionID)
		}
		if turns := piece.GetChanged().GetTurns(); len(turns) > 0 {
			last := turns[len(turns)-1]
			if last.Outcome == kvshuttle.TurnOutcome_TURN_OUTCOME_COMPLETED {
				fmt.Printf("watched: turn %d of %s has ended\n", last.Turn, piece.GetChanged().SessionId)
				break
			}
		}
	}

	ctx, cancel = deadline()
	defer cancel()
	_, err = sessions.EndSession(ctx, &kvshuttle.EndSessionRequest{SessionId: sessionID, RequestId: requestID()})
	check(err)
	fmt.Println("session over")
}

func count(sessions kvshuttle.SessionServiceClient) int {
	known, token := 0, ""
	for {
		ctx, cancel := deadline()
		page, err := sessions.ListSessions(ctx, &kvshuttle.ListSessionsRequest{PageSize: 100, PageToken: token})
		cancel()
		check(err)
		known += len(page.Sessions)
		if token = page.NextPageToken; token == "" {
			return known
		}
	}
}

func turn(sessions kvshuttle.SessionServiceClient, sessionID string) {
	ctx, cancel := deadline()
	defer cancel()
	// The request id makes it safe to send this again.
	answer, err := sessions.BeginTurn(ctx, &kvshuttle.BeginTurnRequest{
		SessionId: sessionID, RequestId: requestID(),
	})
	check(err)
	fmt.Printf("turn %d runs on %s (%s)\n",
		answer.Turn.Turn, answer.Turn.Decode.GetUrl(), answer.Turn.Plan.GetReason())
	_, err = sessions.EndTurn(ctx, &kvshuttle.EndTurnRequest{
		SessionId: sessionID, Turn: answer.Turn.Turn, TurnToken: answer.TurnToken,
		Outcome: kvshuttle.TurnOutcome_TURN_OUTCOME_COMPLETED, RequestId: requestID(),
	})
	check(err)
}

// security is TLS where CA, and for mTLS CERT and KEY, name PEM files.
func security() grpc.DialOption {
	ca := os.Getenv("CA")
	if ca == "" {
		return grpc.WithInsecure()
	}
	pem, err := os.ReadFile(ca)
	check(err)
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		log.Fatalf("%s holds no certificate", ca)
	}
	if cert := os.Getenv("CERT"); cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, os.Getenv("KEY"))
		check(err)
		config.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config))
}

// identity adds the bearer token in TOKEN, and TENANT, whom a gateway or an operator acts for.
func identity(ctx context.Context) context.Context {
	if token := os.Getenv("TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	if tenant := os.Getenv("TENANT"); tenant != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "kvshuttle-tenant", tenant)
	}
	return ctx
}

// deadline is for one call: every call has one, a watch has none.
func deadline() (context.Context, context.CancelFunc) {
	return context.WithTimeout(identity(context.Background()), 5*time.Second)
}

func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

func requestID() string {
	id := make([]byte, 16)
	_, err := rand.Read(id)
	check(err)
	return hex.EncodeToString(id)
}

func argument(number int, otherwise string) string {
	if len(os.Args) > number {
		return os.Args[number]
	}
	return otherwise
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
