// Command box is the image of the tests of package pods: a few tools in one
// static binary.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(command string, args []string) error {
	switch command {
	case "serve": // PORT [READY-FILE]: answers with the client's address
		fmt.Println("serving on", args[0])
		http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			host, _, _ := net.SplitHostPort(r.RemoteAddr)
			name, _ := os.Hostname()
			fmt.Fprintf(w, "%s from %s", name, host)
		})
		http.HandleFunc("/ready", func(w http.ResponseWriter, r *http.Request) {
			if _, err := os.Stat(args[1]); err != nil {
				http.Error(w, "not yet", http.StatusServiceUnavailable)
			}
		})
		l, err := net.Listen("tcp", ":"+args[0])
		if err != nil {
			return err
		}
		return http.Serve(l, nil)
	case "get": // URL
		resp, err := (&http.Client{Timeout: 3 * time.Second}).Get(args[0])
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, err = io.Copy(os.Stdout, resp.Body)
		return err
	case "api": // PATH: asks the API server as the pod's service account
		return api(args[0])
	case "cat":
		for _, a := range args {
			b, err := os.ReadFile(a)
			if err != nil {
				return err
			}
			os.Stdout.Write(b)
		}
	case "copy": // stdin to stdout
		_, err := io.Copy(os.Stdout, os.Stdin)
		return err
	case "write": // FILE CONTENT
		return os.WriteFile(args[0], []byte(args[1]), 0o644)
	case "ls":
		es, err := os.ReadDir(args[0])
		for _, e := range es {
			fmt.Println(e.Name())
		}
		return err
	case "open": // FILE
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err == nil {
			f.Close()
		}
		return err
	case "id":
		fmt.Println(os.Getuid(), os.Getgid(), os.Getpid())
	case "env":
		fmt.Println(strings.Join(os.Environ(), "\n"))
	case "exit": // CODE [TEXT]
		fmt.Println("exiting", strings.Join(args, " "))
		code, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		os.Exit(code)
	case "fail-once": // FILE: fails when FILE does not exist, and makes it
		if _, err := os.Stat(args[0]); err == nil {
			return nil
		}
		_ = os.WriteFile(args[0], nil, 0o644)
		os.Exit(3)
	case "stubborn": // does not end when asked
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("not going")
		time.Sleep(time.Hour) // an empty select is a deadlock, which ends the program
	case "wait":
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("waiting")
		<-c
		fmt.Println("told to end")
	default:
		return fmt.Errorf("unknown command %q", command)
	}
	return nil
}

func api(path string) error {
	const dir = "/var/run/secrets/kubernetes.io/serviceaccount/"
	token, err := os.ReadFile(dir + "token")
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(dir + "ca.crt")
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	host := os.Getenv("KUBERNETES_SERVICE_HOST")
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	req, err := http.NewRequest(http.MethodGet, "https://"+host+":"+os.Getenv("KUBERNETES_SERVICE_PORT")+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+string(token))
	c := &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	fmt.Println(resp.StatusCode)
	_, err = io.Copy(os.Stdout, resp.Body)
	return err
}
