//! Traces for OpenTelemetry: spans of `tracing` that are of Forebay, sent to a collector by OTLP over HTTP in its JSON
//! form, which needs no more than the HTTP client that is here anyway.
//!
//! A span is a step on its way (`hop`), or an action; what is logged inside of it goes along as its events. Nothing
//! waits for the collector: spans that find the queue full, or a collector that does not answer, are dropped and
//! counted.

mod export;
mod layer;
mod otlp;

pub use export::Exporter;
pub use layer::SpanLayer;
