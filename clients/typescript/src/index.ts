// What the package exports: the services with their messages, and the reasons of errors.
export * from "../gen/kvshuttle/v1/types_pb.js";
export * from "../gen/kvshuttle/v1/session_service_pb.js";
export * from "../gen/kvshuttle/v1/lease_service_pb.js";
export * from "../gen/kvshuttle/v1/cluster_service_pb.js";
export { ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";
