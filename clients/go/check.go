package quartet

import (
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	maxTraceparentBytes = 256
	// What the messages around a request add to it, at most: its traceparent, its slot, and tags and lengths.
	maxAroundBytes = maxTraceparentBytes + 64
)

// ownRequest is a copy of a request that can be sent: its caller may change the request while the copy waits to be.
func ownRequest(request *Request) (*Request, error) {
	if err := check(request); err != nil {
		return nil, err
	}
	return proto.Clone(request).(*Request), nil
}

// check returns an *Error, InvalidArgument, for a request that can't be sent, or that no router takes for its size. On
// the stream of a session it would end all requests.
func check(request *Request) error {
	if request == nil {
		return invalid("start", "there is no request")
	}
	if size := proto.Size(request); size > maxMessageBytes-maxAroundBytes {
		failure := invalid(largestField(request), "the request has %d bytes: more than a router takes", size)
		failure.Reason = reasonTooLarge
		return failure
	}
	if _, err := proto.Marshal(request); err != nil {
		return invalid(fieldOfBadText(request), "it can't be sent: %v", err)
	}
	return nil
}

// largestField is the name of the field that has most bytes.
func largestField(request *Request) string {
	name, most := "", 0
	request.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		alone := &Request{}
		alone.ProtoReflect().Set(field, value)
		if size := proto.Size(alone); size > most {
			name, most = string(field.Name()), size
		}
		return true
	})
	return name
}

// fieldOfBadText is the path of the first text that is not UTF-8, such as chat.messages[0].content; "": there is none.
func fieldOfBadText(request *Request) string {
	path := ""
	_ = protorange.Range(request.ProtoReflect(), func(values protopath.Values) error {
		text, isText := values.Index(-1).Value.Interface().(string)
		if !isText || utf8.ValidString(text) {
			return nil
		}
		// Without the first step, which names the message, and the dot of the second.
		path = values.Path[1:].String()[1:]
		return protorange.Terminate
	})
	return path
}
