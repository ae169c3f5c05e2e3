//! Spans as OTLP writes them in JSON (opentelemetry-proto 1, `ExportTraceServiceRequest`): field names in lower camel
//! case, ids in hexadecimal, 64-bit numbers as text.

use serde_json::{Value, json};

use super::layer::Span;

/// `SPAN_KIND_INTERNAL`
const KIND_INTERNAL: u32 = 1;
/// `STATUS_CODE_OK`, `STATUS_CODE_ERROR`
const STATUS: [u32; 2] = [1, 2];

/// A request with these spans.
pub(super) fn request(host: &str, spans: &[Span]) -> Value {
    let resource = [
        ("service.name", json!("forebay-agent")),
        ("service.version", json!(env!("CARGO_PKG_VERSION"))),
        ("host.name", json!(host)),
        ("process.pid", json!(std::process::id())),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": attributes(&resource)},
        "scopeSpans": [{
            "scope": {"name": "forebay", "version": env!("CARGO_PKG_VERSION")},
            "spans": spans.iter().map(span).collect::<Vec<_>>(),
        }],
    }]})
}

fn span(span: &Span) -> Value {
    let events: Vec<Value> = span.events.iter().map(|(at, fields)| event(*at, fields)).collect();
    let [ok, failed] = STATUS;
    json!({
        "traceId": span.trace,
        "spanId": span.id,
        "parentSpanId": span.parent.as_deref().unwrap_or_default(),
        "name": span.name,
        "kind": KIND_INTERNAL,
        "startTimeUnixNano": span.start_ns.to_string(),
        "endTimeUnixNano": span.end_ns.to_string(),
        "attributes": attributes(&span.attributes),
        "events": events,
        "status": match &span.error {
            None => json!({"code": ok}),
            Some(error) => json!({"code": failed, "message": error}),
        },
    })
}

fn event(at_ns: u128, fields: &[(&'static str, Value)]) -> Value {
    let name = fields.iter().find(|(name, _)| *name == "message");
    let others: Vec<_> = fields.iter().filter(|(name, _)| *name != "message").cloned().collect();
    json!({
        "timeUnixNano": at_ns.to_string(),
        "name": name.and_then(|(_, value)| value.as_str()).unwrap_or("event"),
        "attributes": attributes(&others),
    })
}

fn attributes(fields: &[(&'static str, Value)]) -> Value {
    let value = |value: &Value| match value {
        Value::Bool(value) => json!({"boolValue": value}),
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    };
    fields.iter().map(|(name, found)| json!({"key": name, "value": value(found)})).collect()
}
