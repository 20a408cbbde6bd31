// A name for what is generated here: give it your own (and in buf.gen.yaml), or use it with `replace`.
module kvshuttle.example/client

go 1.19

require (
	google.golang.org/genproto v0.0.0-20200413115906-b5235f65be36
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
