-- A store as version 1 of the schema left it, from the program of that time. Frozen.
PRAGMA application_id = 1263948616;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE leases (lease_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "leases" VALUES('lineage-1-1','{"seq":1,"key":["t","s"],"turn":2,"token":"token-2","direction":2,"source":["d",2],"destination":["p",1],"epoch":1,"ttl":30000000000,"create":1000000000000,"ask_head":"14","ask_range":[0,20],"state":4,"version":3,"range":[0,20],"head":"14","grant":1000000000000,"deadline":1030000000000,"end":1000000000000,"reason":"","stats":[1,32,736000,1,0],"stop":null,"reader_stopped":true}');
INSERT INTO "leases" VALUES('lineage-1-2','{"seq":2,"key":["t","s"],"turn":3,"token":"token-3","direction":2,"source":["d",2],"destination":["p",1],"epoch":1,"ttl":30000000000,"create":1000000000000,"ask_head":"14","ask_range":[0,20],"state":5,"version":2,"range":null,"head":"","grant":0,"deadline":0,"end":1000000000000,"reason":"DESTINATION_LOST","stats":null,"stop":null,"reader_stopped":true}');
CREATE TABLE sessions (
    tenant TEXT NOT NULL,
    session_id TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (tenant, session_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "sessions" VALUES('t','s','[1000000000000,1000000000000,1,3,[[1,"token-1",1,0,["p",1,"http://p"],["d",2,"http://d"],[1,"NO_REPLICA",0,0,0],1000000000000,0,300000000000,null,""],[2,"token-2",2,1,["p",1,"http://p"],["d",2,"http://d"],[2,"CHEAPER_TO_MOVE",640,320000000,24720000],1000000000000,1000000000000,300000000000,[1,2,3,4],""],[3,"token-3",1,0,["p",1,"http://p"],["d",2,"http://d"],[2,"CHEAPER_TO_MOVE",640,320000000,24720000],1000000000000,0,30000000000,null,"é\"''"]],[5,3],"p",1099511627785]');
CREATE TABLE term (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    epoch INTEGER NOT NULL,
    lineage_id TEXT NOT NULL,
    last_incarnation INTEGER NOT NULL,
    time_ns INTEGER NOT NULL
) STRICT;
INSERT INTO "term" VALUES(1,7,'lineage-v1',9,123);
CREATE TABLE workers (worker_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "workers" VALUES('d','{"incarnation":2,"boot":"boot-of-d","role":2,"url":"http://d","fenced":false,"register":1000000000000,"heard":1000000000000,"end":0,"draining":false,"generation":1,"block_size":32,"num_blocks":1000,"bytes_per_block":736000,"prefix_caching":true,"vllm":"","agent":""}');
INSERT INTO "workers" VALUES('p','{"incarnation":1,"boot":"boot-of-p","role":1,"url":"http://p","fenced":true,"register":1000000000000,"heard":1000000000000,"end":1000000000000,"draining":false,"generation":1,"block_size":32,"num_blocks":1000,"bytes_per_block":736000,"prefix_caching":true,"vllm":"","agent":""}');
COMMIT;
