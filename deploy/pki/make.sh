#!/bin/sh
# Makes an authority and the certificates of a small deployment with openssl:
#   make.sh DIRECTORY SERVER_NAMES [WORKER...]
# SERVER_NAMES are the control plane's names and addresses, separated by commas, as its callers say
# them; what looks like an address is one. Makes ca.crt, server.{crt,key}, gateway.{crt,key},
# operator.{crt,key} and WORKER.{crt,key}; what is there already stays, so a worker can be added
# later. Keys are readable by their owner only. For more than a few machines let a real authority do
# this (cert-manager in the chart); what counts is the URI in each caller's certificate.
set -eu
umask 077
dir=${1:?directory} names=${2:?names of the control plane}
shift 2
days=${DAYS:-365}
mkdir -p "$dir"
cd "$dir"

if [ ! -f ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$((days * 5))" \
    -keyout ca.key -out ca.crt -subj "/CN=kvshuttle authority" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
fi

# issue FILE SUBJECT ALTERNATIVE_NAMES USAGE
issue() {
  if [ -f "$1.crt" ]; then
    return
  fi
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
    -keyout "$1.key" -out "$1.csr" -subj "/CN=$2" 2>/dev/null
  printf '%s\n' "subjectAltName=$3" "extendedKeyUsage=$4" \
    "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days "$days" \
    -extfile "$1.ext" -out "$1.crt" 2>/dev/null
  rm -f "$1.csr" "$1.ext"
}

alternatives=
for name in $(printf %s "$names" | tr ',' ' '); do
  kind=DNS
  case $name in
    *[!0-9.]*) ;;
    *) kind=IP ;;
  esac
  case $name in *:*) kind=IP ;; esac
  alternatives=$alternatives${alternatives:+,}$kind:$name
done
issue server controlplane "$alternatives" serverAuth
issue gateway gateway "URI:kvshuttle://gateway/gateway" clientAuth
issue operator operator "URI:kvshuttle://operator/operator" clientAuth
for worker in "$@"; do
  issue "$worker" "$worker" "URI:kvshuttle://worker/$worker" clientAuth
done
chmod 644 -- *.crt
