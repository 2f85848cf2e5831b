"""What a process shows of itself: metrics, health over HTTP, and logs. It knows no other part of the system."""
